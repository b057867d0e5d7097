"""
The processes of `bench ros` beside the node: each takes JSON lines on stdin and answers each.

``node`` is the node itself, with a probe that notes when the worker handed over each token;
``engine`` is a bare engine with the same model; ``plain`` serves a bare Trigger and publishes a
bare String; ``talker`` sends goals and hears their feedback; ``listener`` subscribes to tokens and
to the String; ``caller`` is one of eight clients.
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import select
import sys
import time
from typing import Any

from flashrt_ros.cli.benchmarks.ros_probe import node
from flashrt_ros.errors import FlashrtError

TRIGGER, STRING = 'plain_trigger', 'plain_string'
CALLS = ('list', 'save', 'restore', 'trigger')


def commands() -> Iterator[dict[str, Any]]:
    """Yield what the parent says, until it closes the pipe."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(document: Any) -> None:
    """Answer the command."""
    print('@' + json.dumps(document), flush=True)


def told() -> bool:
    """Tell whether the parent has said something."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


class Calls:
    """
    Round trips of the node's services and of the bare Trigger, by the same means.

    :param name: of the node.
    :param session: whose state is saved and restored.
    """

    def __init__(self, node: Any, name: str, session: str) -> None:
        from rclpy.executors import SingleThreadedExecutor
        from std_srvs.srv import Trigger

        from flashrt_ros import srv
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(node)
        own = f'bench_{session}'
        self._requests = {
            'list': srv.ListCapsules.Request(),
            'save': srv.SaveCapsule.Request(session=session, capsule=own, overwrite=True),
            'restore': srv.RestoreCapsule.Request(session=session, capsule='talk', on_busy=2),
            'trigger': Trigger.Request()}
        kinds = {'list': srv.ListCapsules, 'save': srv.SaveCapsule, 'restore': srv.RestoreCapsule}
        names = {'list': 'list_capsules', 'save': 'save_capsule', 'restore': 'restore_capsule'}
        self._clients = {
            key: node.create_client(kind, f'{name}/{names[key]}') for key, kind in kinds.items()}
        self._clients['trigger'] = node.create_client(Trigger, f'{name}/{TRIGGER}')
        for client in self._clients.values():
            if not client.wait_for_service(20.0):
                raise TimeoutError(f'{client.srv_name} did not come up')
        for key in ('trigger', 'restore'):
            self._begin(key)

    def _begin(self, key: str) -> None:
        # A server that was found has not found the client yet: its first answers go nowhere.
        for _ in range(10):
            future = self._clients[key].call_async(self._requests[key])
            self.executor.spin_until_future_complete(future, 2.0)
            if future.done():
                return

    def call(self, key: str) -> tuple[float, Any]:
        """Call once; return the round trip in seconds and the response."""
        begun = time.perf_counter()
        future = self._clients[key].call_async(self._requests[key])
        self.executor.spin_until_future_complete(future, 20.0)
        elapsed = time.perf_counter() - begun
        response: Any = future.result()
        if response is None or getattr(response, 'error_code', False):
            raise RuntimeError(f'{key}: {getattr(response, "error_msg", "no answer in 20 s")}')
        return elapsed, response


def engine(wanted: Any) -> None:
    """Be the bare engine."""
    import torch

    from flashrt_ros.cli.benchmarks.timing import conditions, random_ids
    from flashrt_ros.engine import Engine, EngineConfig, GenerateRequest
    bare = Engine(EngineConfig(model=wanted.model, device=wanted.device, threads=wanted.threads,
                               context=wanted.context))
    vocabulary = bare.model.config.vocab_size

    def block() -> list[int]:
        times: list[int] = []
        bare.generate(GenerateRequest(capsule='talk', max_tokens=wanted.tokens, temperature=0.0),
                      lambda _: times.append(time.monotonic_ns()))
        return times

    def find() -> list[int]:
        """Return a prompt whose greedy answer does not end by itself, as far as one is found."""
        best: tuple[int, list[int]] = (0, [])
        for seed in range(wanted.seed, wanted.seed + 12):
            ids = random_ids(vocabulary, wanted.prompt, seed)
            bare.reset()
            bare.append(token_ids=ids)
            bare.save(name='talk', overwrite=True)
            best = max(best, (len(block()), ids))
            if best[0] >= wanted.tokens:
                break
        bare.reset()
        bare.append(token_ids=best[1])
        bare.save(name='talk', overwrite=True)
        return best[1]

    def restores(count: int) -> list[float]:
        """Restore as the callers do: another session, which stands where it was restored to."""
        bare.restore('other', 'talk')
        seconds = []
        for _ in range(count):
            begun = time.perf_counter()
            bare.restore('other', 'talk')
            seconds.append(time.perf_counter() - begun)
        return seconds

    for command in commands():
        match command['do']:
            case 'find':
                answer({'ids': find(), 'conditions': conditions(bare, wanted.seed),
                        'threads': torch.get_num_threads()})
            case 'block':
                answer(block())
            case 'restores':
                answer(restores(command['count']))
    bare.close()


def plain(wanted: Any) -> None:
    """Be the bare server: a Trigger, and a String topic on request."""
    import threading

    import rclpy
    from std_msgs.msg import String
    from std_srvs.srv import Trigger
    rclpy.init()
    node = rclpy.create_node('plain')

    def handle(_: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = True
        return response

    def listen() -> None:
        for command in commands():
            state['period'] = command['period']
            answer('ok')
        state['period'] = -1.0

    state = {'period': 0.0}
    publisher = node.create_publisher(String, f'{wanted.node}/{STRING}', 256)
    node.create_service(Trigger, f'{wanted.node}/{TRIGGER}', handle)
    threading.Thread(target=listen, daemon=True).start()
    sent = time.monotonic()
    while (period := state['period']) >= 0:
        rclpy.spin_once(node, timeout_sec=min(0.05, max(0.0, sent + period - time.monotonic()))
                        if period else 0.05)
        if period and time.monotonic() >= sent + period:
            sent = time.monotonic()
            publisher.publish(String(data=str(time.monotonic_ns())))


def talker(wanted: Any) -> None:
    """Send goals, one after the other, and note when the feedback of each token arrives."""
    import rclpy

    from flashrt_ros.client import FlashrtClient
    arrivals: list[tuple[str, int, int, int]] = []
    endings: list[int] = []
    rclpy.init()
    client = FlashrtClient(rclpy.create_node('talker'), wanted.node, timeout=20.0)

    def goal() -> None:
        stream = client.generate(
            session='talk', capsule='talk', max_tokens=wanted.tokens, temperature=0.0,
            on_busy='wait', on_token=lambda token: arrivals.append(_arrival(token)))
        endings.append(stream.result(60.0).completion_tokens)

    for command in commands():
        if command['do'] == 'stop':
            continue  # it has ended what ran, and that is answered
        client.wait_for(_after(0.3), 1.0)  # what came while nobody looked is not late
        arrivals.clear()
        endings.clear()
        if command['do'] == 'forever':
            answer('started')
            while not told():
                goal()
        else:
            goal()
        client.wait_for(_after(0.1), 1.0)  # the last tokens
        answer({'arrivals': arrivals, 'endings': endings})


def listener(wanted: Any) -> None:
    """Subscribe to the tokens and to the bare String, and note when each one arrives."""
    import rclpy
    from rclpy.executors import SingleThreadedExecutor
    from std_msgs.msg import String

    from flashrt_ros.msg import Token
    arrivals: list[tuple[str, int, int, int]] = []
    strings: list[int] = []
    rclpy.init()
    node = rclpy.create_node('listener')
    executor = SingleThreadedExecutor()
    executor.add_node(node)

    def spin(seconds: float) -> None:
        until = _after(seconds)
        while not until():
            executor.spin_once(timeout_sec=0.05)

    for command in commands():
        if command['do'] == 'stop':
            continue
        heard = [
            node.create_subscription(
                Token, f'{wanted.node}/tokens',
                lambda token: arrivals.append(_arrival(token)), 256),
            node.create_subscription(
                String, f'{wanted.node}/{STRING}',
                lambda text: strings.append(time.monotonic_ns() - int(text.data)), 256)]
        spin(0.3)
        arrivals.clear()
        strings.clear()
        answer('listening')
        while not told():
            executor.spin_once(timeout_sec=0.05)
        spin(0.1)
        for subscription in heard:
            node.destroy_subscription(subscription)
        answer({'arrivals': arrivals, 'strings': strings})


def _arrival(token: Any) -> tuple[str, int, int, int]:
    now = time.monotonic_ns()
    return bytes(token.goal_id.uuid).hex(), token.index, len(token.token_ids), now


def leave_alone(wanted: Any) -> None:
    """Send one goal and go away once it is accepted: nobody listens to its tokens."""
    import rclpy

    from flashrt_ros.client import FlashrtClient
    for _ in commands():
        rclpy.init()
        client = FlashrtClient(rclpy.create_node('leaves'), wanted.node, timeout=20.0)
        stream = client.generate(session='talk', capsule='talk', max_tokens=wanted.tokens,
                                 temperature=0.0, on_busy='wait')
        while stream.handle is None:
            client.wait_for(_after(0.002), None)
        client.destroy()
        rclpy.shutdown()
        answer('left')


def caller(wanted: Any) -> None:
    """Be one of the clients: paced calls, as a robot makes them."""
    import rclpy
    rclpy.init()
    calls = Calls(rclpy.create_node(f'caller_{wanted.session}'), wanted.node, wanted.session)
    answer('ready')
    for command in commands():
        seconds: dict[str, list[float]] = {key: [] for key in CALLS}
        until = time.monotonic() + command['seconds']
        due, number = time.monotonic(), 0
        while time.monotonic() < until:
            key = CALLS[number % len(CALLS)]
            seconds[key].append(calls.call(key)[0])
            number += 1
            due = max(due + 1.0 / command['rate'], time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        answer(seconds)


def _after(seconds: float) -> Any:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def main() -> int:
    """Be one of them."""
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument('role')
    for option in ('--model', '--device', '--node', '--session', '--probe'):
        parser.add_argument(option, default='')
    for option in ('--threads', '--context', '--tokens', '--prompt', '--seed'):
        parser.add_argument(option, type=int, default=0)
    wanted, _ = parser.parse_known_args()
    roles = {'node': node, 'engine': engine, 'plain': plain, 'talker': talker, 'caller': caller,
             'leaver': leave_alone, 'listener': listener}
    try:
        return roles[wanted.role](wanted) or 0
    except FlashrtError as error:  # of the model, say: whoever measures tells it
        answer({'refused': error.code, 'why': str(error)})
        return 1


if __name__ == '__main__':
    sys.exit(main())
