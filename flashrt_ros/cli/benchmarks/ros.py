"""
What the ROS side costs: round trips, the way of a token, publishing, each beside a bare peer.

The node is a process of its own, and so is every peer. A probe in the node notes when its worker
hands over a token (`CLOCK_MONOTONIC`, which all processes of a machine share).
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import os
from pathlib import Path
import statistics
import time
from typing import Any

from flashrt_ros.cli import output
from flashrt_ros.cli.benchmarks.ros_parts import CALLS, Calls
from flashrt_ros.cli.benchmarks.ros_probe import worker
from flashrt_ros.cli.benchmarks.ros_process import Part
from flashrt_ros.cli.benchmarks.timing import Samples
from flashrt_ros.cli.opening import pool_bytes

CLIENTS = 8
RATE = 10.0          # calls a second of each of the eight
STRING_PERIOD = 0.01
DEFAULT_RATE = 100.0  # Token messages a second: stream.max_rate_hz as it is by default
START = 60.0         # seconds that a process may take to come up
WARM = 5             # calls of each kind that are not counted
LIMIT = 12.0         # seconds for one kind of measurement, so that all end within a minute
#: limits of the design, in milliseconds and as a share; a machine that is busy misses them
TARGETS = {'restore_streaming_over_own_ms': 2.0, 'restore_streaming_over_own_p99_ms': 5.0,
           'token_latency_ms': 1.0, 'publishing_share': 0.02,
           'between_tokens_eight_p99_over_median': 1.2}


class Bench:
    """The run: who takes part, and what was measured."""

    def __init__(self, folder: Path, environment: dict[str, str], options: dict[str, Any],
                 quick: bool) -> None:
        self.folder = folder
        self.environment = environment
        self.quick = quick
        self.name = '/bench/flashrt'
        self.probe = folder / 'probe.jsonl'
        self.options = {**options, 'node': self.name, 'probe': self.probe}
        self.parts: list[Part] = []
        self.samples: dict[str, Samples] = {}
        self.node: Any = None
        self.calls: Any = None
        self.listener: Any = None
        self._setter: Any = None
        self._spent: dict[str, dict[str, float]] = {}  # by the thread that computes, on a token
        self._node_seconds = 0.0  # of all its threads, for each of the idle calls

    def part(self, role: str, *arguments: str, **more: object) -> Part:
        """Start a process."""
        self.parts.insert(0, Part(role, self.environment, self.folder, *arguments,
                                  **self.options, **more))
        return self.parts[0]  # the node, which comes first, is the last to end

    def add(self, name: str, seconds: Any) -> None:
        """Add measurements, in seconds."""
        self.samples.setdefault(name, Samples()).seconds.extend(seconds)

    def run(self, client: Any) -> dict[str, Any]:
        """Measure everything and return the document."""
        begun = time.monotonic()
        self.node = client.node
        engine = self.part('engine')
        facts = engine.ask(do='find')
        plain, talker, leaver = self.part('plain'), self.part('talker'), self.part('leaver')
        listener = self.listener = self.part('listener')
        client.wait_until_active(START)
        client.generate(token_ids=facts['ids'], max_tokens=0, session='talk').result(START)
        client.save('talk', 'talk', pin=True)
        calls = self.calls = Calls(client.node, self.name, 'main')
        self.decode(engine, talker, leaver)
        output.log(f'{time.monotonic() - begun:.0f} s: decoding is measured; now the services')
        count = 40 if self.quick else 200
        before = self.node_seconds()
        self.trips(calls, 'idle', count)
        self._node_seconds = (self.node_seconds() - before) / (
            3 * (len(self.samples['list_idle'].seconds) + WARM))
        self.add('restore_own', engine.ask(do='restores', count=count))
        plain.ask(period=STRING_PERIOD)
        listener.ask(do='listen')
        talker.ask(do='forever')
        self.trips(calls, 'streaming', count)
        self.heard('', talker.ask(do='stop'), listener.ask(do='stop'))
        output.log(f'{time.monotonic() - begun:.0f} s: now {CLIENTS} clients')
        callers = [self.part('caller', session=f'c{number}') for number in range(CLIENTS)]
        for caller in callers:
            caller.hear()
        seen = len(self.notes())
        listener.ask(do='listen')
        talker.ask(do='forever')
        for caller in callers:
            caller.tell(seconds=3.0 if self.quick else 8.0, rate=RATE)
        for caller in callers:
            for key, seconds in caller.hear().items():
                self.add(f'{key}_eight', seconds)
        self.heard('_eight', talker.ask(do='stop'), listener.ask(do='stop'))
        lines = self.notes()[seen:]
        self._spent['eight'] = worker(lines)
        for line in lines:
            self.add('token_eight', _intervals(_times(line)))
            self.add('step_eight', _late([apart / 1e9 for apart in line['steps']]))
        return self.document(facts)

    def rate(self, messages: float) -> None:
        """Set how many Token messages a second the node sends at most; 0: one a token."""
        from rcl_interfaces.srv import SetParameters
        from rclpy.parameter import Parameter
        if self._setter is None:
            self._setter = self.node.create_client(SetParameters, f'{self.name}/set_parameters')
            self._setter.wait_for_service(20.0)
        request = SetParameters.Request(parameters=[
            Parameter('stream.max_rate_hz', value=messages).to_parameter_msg()])
        future = self._setter.call_async(request)
        self.calls.executor.spin_until_future_complete(future, 20.0)

    def trips(self, calls: Calls, when: str, count: int) -> None:
        """Alternate between the calls; the bare one stands between all others."""
        until = time.monotonic() + LIMIT
        for index in range(count + WARM):
            if index > 30 and time.monotonic() > until:
                break  # a machine that is busy gets fewer, and `repeats` says so
            for key in ('list', 'trigger', 'save', 'restore'):
                seconds, response = calls.call(key)
                if index >= WARM:
                    self.add(f'{key}_{when}', [seconds])
                    if key == 'restore':  # what of it is the node's: its turn, and the work
                        inside = response.elapsed.sec + response.elapsed.nanosec / 1e9
                        self.add(f'restore_inside_{when}', [inside])

    def decode(self, engine: Part, talker: Part, leaver: Part) -> None:
        """
        Alternate blocks: bare engine, node that nobody hears, node with a client.

        The last one twice: with the node's own limit of messages, and with one for each token,
        which stays for what follows.
        """
        until = time.monotonic() + LIMIT
        lines: dict[str, list[dict[str, Any]]] = {'alone': [], 'heard': [], 'each': []}
        for index in range(3 if self.quick else 7):
            if index > 2 and time.monotonic() > until:
                break
            blocks = {'bare': _intervals(engine.ask(do='block'))}
            self.rate(DEFAULT_RATE)
            seen = len(self.notes())
            leaver.ask(do='goal')
            lines['alone'].append(self.new_notes(seen))
            for name, rate in (('heard', DEFAULT_RATE), ('each', 0.0)):
                self.rate(rate)
                seen = len(self.notes())
                self.listener.ask(do='listen')
                told = talker.ask(do='goal')
                found = self.listener.ask(do='stop')
                lines[name].append(self.new_notes(seen))
            blocks.update((name, _intervals(_times(of[-1]))) for name, of in lines.items())
            if index:  # the first round warms up
                for name, intervals in blocks.items():
                    self.add(f'token_{name}', intervals)
                    self.add(f'block_{name}', [statistics.fmean(intervals)])
                self.heard('_only', told, found, False)
        self._spent = {name: worker(of[1:]) for name, of in lines.items()}

    def heard(self, when: str, told: dict[str, Any], found: dict[str, Any],
              strings: bool = True) -> None:
        """Hold what talker and listener heard against what the probe noted."""
        noted = {(line['goal'], index): at for line in self.notes()
                 for at, index, _ in line['pieces']}
        for name, arrivals in (('feedback', told['arrivals']), ('token', found['arrivals'])):
            self.add(f'{name}_latency{when}', [
                (at - noted[goal, token]) / 1e9 for goal, index, count, at in arrivals
                for token in range(index, index + count) if (goal, token) in noted])
        if strings:
            self.add(f'string_latency{when}', [value / 1e9 for value in found['strings']])

    def node_seconds(self) -> float:
        """Return the time that the node's threads have computed."""
        stat = Path(f'/proc/{self.parts[-1].process.pid}/stat').read_text(encoding='ascii')
        ticks = stat.rpartition(')')[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf('SC_CLK_TCK')

    def notes(self) -> list[dict[str, Any]]:
        """Return what the probe noted, a line a goal."""
        if not self.probe.exists():
            return []
        return [json.loads(line) for line in self.probe.read_text().splitlines()
                if line.endswith('}')]

    def new_notes(self, seen: int) -> dict[str, Any]:
        """Wait for the end of the goal that was sent, and return its notes."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            found = self.notes()
            if len(found) > seen:
                return found[-1]
            time.sleep(0.05)
        raise RuntimeError('a goal of the benchmark did not end in 60 s')

    def document(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return all figures, medians and 99th percentiles in milliseconds."""
        get = self.samples
        rows = []
        for when in ('idle', 'streaming', 'eight'):
            row: dict[str, Any] = {'when': when}
            for key in CALLS:
                row.update(get[f'{key}_{when}'].document(key))
            if f'restore_inside_{when}' in get:
                row.update(get[f'restore_inside_{when}'].document('restore_inside'))
            row['restore_over_trigger'] = round(
                get[f'restore_{when}'].median / get[f'trigger_{when}'].median, 3)
            rows.append(row)
        tokens: dict[str, Any] = {}
        for name in (*(f'{what}_latency{when}' for what in ('token', 'feedback')
                       for when in ('_only', '', '_eight')),
                     'string_latency', 'string_latency_eight'):
            tokens.update(get[name].document(name))
        decode: dict[str, Any] = {}
        for name in ('bare', 'alone', 'heard', 'each'):
            decode.update(get[f'token_{name}'].document(f'token_{name}'))
            decode[f'{name}_tokens_per_second'] = round(1e3 / get[f'block_{name}'].median, 2)
        bare, alone, heard, each = (
            get[f'block_{name}'].median for name in ('bare', 'alone', 'heard', 'each'))
        for name in ('token_eight', 'step_eight'):  # on the clock of the host; of the device
            if get[name].seconds:
                gaps = get[name]
                decode.update(gaps.document(name))
                decode[f'{name}_p999_ms'] = round(gaps.quantile(0.999), 4)
        decode['node_over_bare'] = round(alone / bare, 4)
        decode['heard_over_alone'] = round(heard / alone, 4)
        decode['heard_over_bare'] = round(heard / bare, 4)
        decode['each_over_bare'] = round(each / bare, 4)
        own = get['restore_own']
        found = {
            'restore_streaming_over_own_ms': get['restore_streaming'].median - own.median,
            'restore_streaming_over_own_p99_ms': get['restore_streaming'].p99 - own.median,
            'token_latency_ms': get['token_latency_only'].median,
            'publishing_share': heard / alone - 1.0,
            'between_tokens_eight_p99_over_median': gaps.p99 / gaps.median}
        return {
            'rows': rows, 'node_ms_a_call': round(self._node_seconds * 1e3, 3),
            'tokens': tokens, 'decode': decode, 'worker': self._spent,
            **own.document('restore_own'),
            'targets': {name: {'found': round(found[name], 4), 'at_most': limit,
                               'met': found[name] <= limit} for name, limit in TARGETS.items()},
            'clients': CLIENTS, 'calls_a_second_each': RATE, 'cores': os.cpu_count(),
            'load_average': [round(value, 2) for value in os.getloadavg()],
            **facts['conditions']}

    def close(self) -> None:
        """End all processes but the node."""
        for part in self.parts:
            part.close()


def measure(model: str, device: str, threads: int, seed: int, quick: bool,
            parameters: Sequence[str] = ()) -> dict[str, Any]:
    """
    Start node and peers in a domain of their own, measure, end them all.

    :param parameters: of the node, beside its defaults, as `name:=value`.
    """
    import tempfile

    from flashrt_ros.cli.show.process import own_domain, private_environment
    domain = own_domain()
    environment = private_environment(domain)
    os.environ.update(environment)
    import rclpy

    from flashrt_ros.client import FlashrtClient
    tokens = 64 if quick else 128
    options = {'model': model, 'device': device, 'threads': threads, 'seed': seed,
               'tokens': tokens, 'prompt': 192, 'context': 1024}
    with tempfile.TemporaryDirectory(prefix='flashrt-bench-') as folder:
        place = Path(folder)
        bench = Bench(place, environment, options, quick)
        rclpy.init(domain_id=domain)
        client = None
        try:
            bench.part('node', *_node_arguments(options), *(
                word for parameter in parameters for word in ('-p', parameter)))
            client = FlashrtClient(rclpy.create_node('bench'), bench.name, timeout=20.0)
            return {**bench.run(client), 'parameters': list(parameters)}
        finally:
            if client is not None:
                client.destroy()
            bench.close()
            rclpy.try_shutdown()


def _node_arguments(options: dict[str, Any]) -> list[str]:
    """Return what makes the node: the model of the bare engine, else its defaults."""
    parameters = {'autostart': 'true', 'model.path': options['model'], 'device': options['device'],
                  'model.threads': options['threads'], 'context.max_tokens': options['context'],
                  'capsules.device_bytes': pool_bytes(  # each of nine clients saves and forks
                      options['model'], 'auto', options['device'], options['context'],
                      rows=4 * options['context'], blocks=64)}
    arguments = ['--ros-args', '-r', '__ns:=/bench']
    for name, value in parameters.items():
        arguments += ['-p', f'{name}:={value}']
    return arguments


def _times(line: dict[str, Any]) -> list[int]:
    return [at for at, _, _ in line['pieces']]


def _intervals(times: list[int]) -> list[float]:
    """Return the steps in seconds, as :func:`_late`."""
    return _late([(after - before) / 1e9 for before, after in zip(times, times[1:])])


def _late(steps: list[float]) -> list[float]:
    """Leave out the first quarter: somebody is still leaving then."""
    return steps[len(steps) // 4:]
