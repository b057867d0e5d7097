"""
A small client of the node, for nodes, tests and tools; importing it needs no torch.

Example::

    client = FlashrtClient(node)
    client.wait_until_active(timeout=30.0)
    stream = client.generate(prompt='Bring me the cup.', max_tokens=64)
    for token in stream:
        print(token.text, end='')
    answer = stream.result()
    client.save('kitchen', persist=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import threading
import time
from typing import Any
from weakref import WeakValueDictionary

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.callback_groups import CallbackGroup, ReentrantCallbackGroup
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.task import Future
from std_srvs.srv import Trigger

from flashrt_ros import srv
from flashrt_ros.action import Generate
from flashrt_ros.chat_messages import pairs
from flashrt_ros.errors import DeadlineExceeded, FlashrtError, NotActive
from flashrt_ros.filling import fill, to_duration
from flashrt_ros.goal_client import GoalClient
from flashrt_ros.msg import ChatMessage, Token
from flashrt_ros.stream import CALLS_QOS, error_of, Stream

_SERVICES = {
    'save_capsule': srv.SaveCapsule, 'restore_capsule': srv.RestoreCapsule,
    'fork_capsule': srv.ForkCapsule, 'rollback': srv.Rollback,
    'list_capsules': srv.ListCapsules, 'drop_capsule': srv.DropCapsule,
    'pin_capsule': srv.PinCapsule, 'close_session': srv.CloseSession,
    'reset': Trigger, 'cancel_all': Trigger, 'change_state': ChangeState, 'get_state': GetState}
_GREETER = 'get_state'
_TRANSITIONS = {
    'configure': Transition.TRANSITION_CONFIGURE, 'activate': Transition.TRANSITION_ACTIVATE,
    'deactivate': Transition.TRANSITION_DEACTIVATE, 'cleanup': Transition.TRANSITION_CLEANUP}
_ASK_AGAIN = 1.0  # seconds after which a greeting is given up: its answer went nowhere
_LOOK = 0.1  # seconds between two looks whether the node is still there
ON_BUSY = {'default': 0, 'reject': 1, 'wait': 2, 'preempt': 3}


class FlashrtClient:
    """
    Calls the services and the action of one flashrt node.

    Blocking calls work in two ways: where `node` is in an executor, that one has to spin in
    another thread; else the client spins the node itself while it waits. Never block inside a
    callback of a single-threaded executor: use `is_ready` and ``call_async`` there.

    A node that was found has not found the client yet, and its first answers would go nowhere. So
    each blocking call first waits until the node has answered a question that costs nothing.

    :param node: any rclpy node of this process.
    :param name: full name of the flashrt node.
    :param timeout: seconds that a call waits for an answer where it does not say.
    """

    def __init__(self, node: Node, name: str = '/flashrt', *, timeout: float = 10.0,
                 callback_group: CallbackGroup | None = None) -> None:
        self.node = node
        self.name = name.rstrip('/')
        self.timeout = timeout
        self._group = callback_group or ReentrantCallbackGroup()
        self._own: SingleThreadedExecutor | None = None
        # The node, as discovery names it, that has answered: it knows all that was made before.
        self._known: frozenset[bytes] | None = None
        self._greeting: tuple[Future, float, frozenset[bytes]] | None = None
        self._asking = threading.Lock()
        self._clients: dict[str, Any] = {}
        self.streams: WeakValueDictionary[bytes, Stream] = WeakValueDictionary()
        self.action = GoalClient(node, f'{self.name}/generate', self._group, self._take)
        # Last the one that greets: discovery tells of endpoints in the order they were made in.
        for key, kind in _SERVICES.items():
            self._clients[key] = node.create_client(
                kind, f'{self.name}/{key}', qos_profile=CALLS_QOS, callback_group=self._group)

    def _take(self, message: Any) -> None:
        stream = self.streams.get(bytes(message.goal_id.uuid))
        if stream is not None:
            stream.take(message.feedback.token)

    def destroy(self) -> None:
        """Destroy clients and, where there is one, the client's own executor."""
        self.action.destroy()
        for client in self._clients.values():
            self.node.destroy_client(client)
        if self._own is not None:
            self._own.remove_node(self.node)
            self._own.shutdown()
            self._own = None

    # -- being there ------------------------------------------------------------------------

    def is_ready(self, service: str = 'generate') -> bool:
        """
        Tell whether the node is there and knows this client, so that no answer gets lost.

        Never blocks: it asks, and somebody has to spin until a later call finds the answer.

        :param service: 'generate', or a service, named as in the interface.
        """
        found = (self.action.server_is_ready() if service == 'generate'
                 else self._clients[service].service_is_ready())
        # One that was started again has to find this client anew. It has another publisher.
        node = frozenset(bytes(info.endpoint_gid) for info in
                         self.node.get_publishers_info_by_topic(f'{self.name}/state'))
        with self._asking:
            return found and (node == self._known or self._greet(node))

    def _greet(self, node: frozenset[bytes]) -> bool:
        """Ask the question, or look whether it is answered."""
        greeter = self._clients[_GREETER]
        if self._greeting is not None:
            future, since, asked = self._greeting
            if future.done():
                self._greeting = None
                self._known = asked if future.exception() is None else None
                if node == self._known:
                    return True
            elif asked == node and time.monotonic() - since < _ASK_AGAIN:
                return False
            else:
                self.forget(_GREETER, future)
                self._greeting = None
        if greeter.service_is_ready():
            self._greeting = greeter.call_async(GetState.Request()), time.monotonic(), node
        return False

    def wait_until_ready(self, timeout: float, service: str = 'generate') -> None:
        """
        Block until `is_ready`.

        :raises DeadlineExceeded: the node was not found, or did not answer.
        """
        self.wait_for(lambda: self.is_ready(service), timeout, what=f'any sign of {service}')

    # -- waiting ----------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], bool], timeout: float | None,
                 event: threading.Event | None = None,
                 alive: Callable[[], bool] = lambda: True, what: str = 'the answer') -> None:
        """
        Block until a condition holds, spinning where nobody else does.

        :param event: is set when the condition may have come true.
        :param alive: asked now and then; False for two seconds means that the node is gone.
        :raises DeadlineExceeded, NotActive: it did not come true.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        last_alive = looked_at = time.monotonic()
        spin = self.node.executor is None or self.node.executor is self._own
        while not condition():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise DeadlineExceeded(
                    f'{self.name} did not send {what} within {timeout:g} s: is it running, and in '
                    'the same ROS domain?')
            step = 0.1 if deadline is None else min(0.1, deadline - now)
            if spin:
                self._spin(step)
            elif event is not None:
                event.wait(step)
                event.clear()
            else:
                time.sleep(min(step, 0.002))
            now = time.monotonic()
            if now - looked_at < _LOOK:
                continue
            looked_at = now
            if alive():
                last_alive = now
            elif now - last_alive > 2.0:
                raise NotActive(f'{self.name} went away before {what}: start it again.')

    def _spin(self, timeout: float) -> None:
        if self._own is None:
            self._own = SingleThreadedExecutor(context=self.node.context)
            self._own.add_node(self.node)
        self._own.spin_once(timeout_sec=timeout)

    def wait_until_active(self, timeout: float) -> None:
        """
        Block until the node serves requests.

        :raises DeadlineExceeded, NotActive: it does not come up.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                if self.lifecycle(timeout=min(2.0, max(left, 0.01))) == 'active':
                    self.wait_until_ready(max(deadline - time.monotonic(), 0.01))
                    return
            except DeadlineExceeded:
                if left <= 0:
                    raise
            if time.monotonic() > deadline:
                raise NotActive(f'{self.name} was not active within {timeout:g} s: look at its '
                                f'log, and at `ros2 lifecycle get {self.name}`.')
            self.wait_for(_after(0.1), 1.0)

    # -- calls ------------------------------------------------------------------------------

    def call_async(self, service: str, request: Any) -> Future:
        """
        Send a request to a service, named as in the interface; return the rclpy future.

        Where `is_ready` was not true before, the answer may get lost.
        """
        return self._clients[service].call_async(request)

    def forget(self, service: str, future: Future) -> None:
        """Give up waiting for an answer that `call_async` promised."""
        self._clients[service].remove_pending_request(future)

    def call(self, service: str, request: Any, timeout: float | None = None,
             check: bool = True) -> Any:
        """
        Send a request and wait for the response.

        :param check: raise the typed error of a code; False returns the response as it is.
        :raises FlashrtError: by the code; DeadlineExceeded where no answer came.
        """
        timeout = self.timeout if timeout is None else timeout
        begin = time.monotonic()
        self.wait_until_ready(timeout, service)
        future = self.call_async(service, request)
        event = threading.Event()
        future.add_done_callback(lambda _: event.set())
        try:
            self.wait_for(future.done, max(0.01, timeout - (time.monotonic() - begin)), event,
                          what=f'the answer of {service}')
        except FlashrtError:
            self.forget(service, future)
            raise
        response = future.result()
        if check and (hasattr(response, 'error_code') or isinstance(response, Trigger.Response)):
            error = error_of(response)
            if error is not None:
                raise error
        return response

    def _ask(self, service: str, timeout: float | None, **fields: Any) -> Any:
        return self.call(service, fill(_SERVICES[service].Request, **fields), timeout)

    def save(self, capsule: str, session: str = '', *, timeout: float | None = None,
             **fields: Any) -> srv.SaveCapsule.Response:
        """Save a session; `fields` are those of SaveCapsule: overwrite, pin, persist, ..."""
        return self._ask('save_capsule', timeout, capsule=capsule, session=session, **fields)

    def restore(self, capsule: str, session: str = '', *, seed: int | None = None,
                on_busy: str = 'default', expected_epoch: int = 0, timeout: float | None = None
                ) -> srv.RestoreCapsule.Response:
        """
        Make a capsule the state of a session.

        :param expected_epoch: refuse where the session's epoch is another one; 0 for any.
        """
        return self._ask(
            'restore_capsule', timeout, capsule=capsule, session=session, reseed=seed is not None,
            seed=seed or 0, on_busy=ON_BUSY[on_busy], expected_epoch=expected_epoch)

    def fork(self, sessions: Sequence[str], capsule: str = '', *, source_session: str = '',
             seeds: Sequence[int] = (), timeout: float | None = None) -> srv.ForkCapsule.Response:
        """Start sessions from a capsule, or from the live state of a session."""
        return self._ask('fork_capsule', timeout, capsule=capsule, source_session=source_session,
                         sessions=sessions, seeds=seeds)

    def rollback(self, *, position: int | None = None, tokens: int | None = None,
                 turns: int | None = None, session: str = '', timeout: float | None = None,
                 **fields: Any) -> srv.Rollback.Response:
        """Go back: give one of position, tokens and turns."""
        given = [(to, value) for to, value in enumerate((position, tokens, turns))
                 if value is not None]
        if len(given) != 1:
            raise TypeError('rollback() takes exactly one of position, tokens and turns')
        return self._ask('rollback', timeout, session=session, to=given[0][0], value=given[0][1],
                         **fields)

    def list(self, session: str = '', *, timeout: float | None = None) -> list[Any]:
        """Return the CapsuleInfo messages, sorted by name."""
        return self._ask('list_capsules', timeout, session=session).capsules

    def drop(self, capsule: str, *, timeout: float | None = None) -> srv.DropCapsule.Response:
        """Drop a capsule and its file."""
        return self._ask('drop_capsule', timeout, capsule=capsule)

    def pin(self, capsule: str, pin: bool = True, *, timeout: float | None = None
            ) -> srv.PinCapsule.Response:
        """Pin a capsule, or release it."""
        return self._ask('pin_capsule', timeout, capsule=capsule, pin=pin)

    def close_session(self, session: str = '', *, timeout: float | None = None
                      ) -> srv.CloseSession.Response:
        """Close a session; its capsules stay."""
        return self._ask('close_session', timeout, session=session)

    def reset(self, *, timeout: float | None = None) -> None:
        """Empty the default session."""
        self.call('reset', Trigger.Request(), timeout)

    def cancel_all(self, *, timeout: float | None = None) -> None:
        """Tell all goals to end."""
        self.call('cancel_all', Trigger.Request(), timeout)

    def lifecycle(self, *, timeout: float | None = None) -> str:
        """Return the lifecycle state's name."""
        return self.call('get_state', GetState.Request(), timeout).current_state.label

    def change_state(self, transition: str, *, timeout: float | None = None) -> bool:
        """Run 'configure', 'activate', 'deactivate' or 'cleanup'; return whether it succeeded."""
        request = ChangeState.Request(transition=Transition(id=_TRANSITIONS[transition]))
        return self.call('change_state', request, timeout).success

    def generate(self, prompt: str = '', *, messages: Sequence[tuple[str, str]] = (),
                 seed: int | None = None, on_busy: str = 'default', timeout: float = 0.0,
                 on_token: Callable[[Token], None] | None = None, **fields: Any) -> Stream:
        """
        Send a goal and return its stream; `fields` are those of Generate.

        :param timeout: seconds that the node gives the goal, queue included; 0: its parameter.
        :param on_token: called for each Token message, on the thread that spins.
        """
        if not self.is_ready():
            self.wait_until_ready(self.timeout)
        goal = fill(
            Generate.Goal, prompt=prompt,
            messages=[fill(ChatMessage, role=role, content=content)
                      for role, content in pairs(messages)],
            reseed=seed is not None, seed=seed or 0, on_busy=ON_BUSY[on_busy],
            timeout=to_duration(timeout), **fields)
        return Stream(self, goal, on_token)


def _after(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


__all__ = ['FlashrtClient', 'Stream', 'error_of', 'to_duration']
