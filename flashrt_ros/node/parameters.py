"""Parameters of the node: one table that declares, describes, validates and reads them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
import difflib
import math
import os
from typing import Any, TYPE_CHECKING

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
from rclpy.parameter import Parameter

from flashrt_ros.errors import InvalidArgument, InvalidName
from flashrt_ros.node.requests import check_name

if TYPE_CHECKING:
    from rclpy.node import Node

    from flashrt_ros.engine import EngineConfig
    from flashrt_ros.node.scheduling import Scheduling

_MAX_INT = 2 ** 63 - 1


@dataclass(frozen=True)
class Spec:
    """
    One parameter.

    ``baked`` parameters shape what `configure` allocates: they can be changed while the node is
    unconfigured only. They are not ``read_only``, which would refuse them there too.
    """

    name: str
    default: bool | int | float | str
    text: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[Any], str] | None = None
    baked: bool = False
    many: bool = False  # one integer or a list of them

    def descriptor(self) -> ParameterDescriptor:
        """Return the descriptor that `ros2 param describe` shows."""
        out = ParameterDescriptor(name=self.name, description=self.text)
        out.additional_constraints = self.allowed()
        if isinstance(self.default, bool) or isinstance(self.default, str):
            return out
        if self.many:
            out.dynamic_typing = True
            return out
        if isinstance(self.default, int):
            out.integer_range = [IntegerRange(
                from_value=int(self.low or 0),
                to_value=_MAX_INT if self.high is None else int(self.high))]
        else:
            # An integer is welcome where a float is meant: `temperature: 0` in a file.
            out.dynamic_typing = True
            out.floating_point_range = [FloatingPointRange(
                from_value=float(self.low or 0.0),
                to_value=1e308 if self.high is None else float(self.high))]
        return out

    def allowed(self) -> str:
        """Say in words which values are allowed, and when."""
        return self._values() + ('; only while unconfigured' if self.baked else '')

    def _values(self) -> str:
        if self.choices:
            words = 'one of ' + ', '.join(self.choices)
        elif isinstance(self.default, bool):
            words = 'true or false'
        elif isinstance(self.default, str):
            words = 'text'
        elif self.many:
            words = f'an integer, {self.low} to {self.high}, or a list of them'
        else:
            kind = 'an integer' if isinstance(self.default, int) else 'a number'
            words = f'{kind}, at least {self.low or 0}'
            if self.high is not None:
                words += f' and at most {self.high}'
        return words

    def refusal(self, value: Any) -> str:
        """Return '' where `value` is allowed, else a sentence that says what is."""
        if self.many:
            fits = all(type(one) is int and self._within(one) for one in listed(value))
            return '' if fits else f'{self.name} must be {self._values()}, not {value!r}.'
        if isinstance(self.default, float):
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = fits and math.isfinite(value)
        else:
            fits = type(value) is type(self.default)
        if fits and self.choices:
            fits = value in self.choices
        elif fits and isinstance(value, (int, float)) and not isinstance(value, bool):
            fits = self._within(value)
        if not fits:
            return f'{self.name} must be {self._values()}, not {value!r}.'
        return self.check(value) if self.check else ''

    def _within(self, value: float) -> bool:
        return (self.low or 0) <= value and (self.high is None or value <= self.high)


def listed(value: Any) -> list[Any]:
    """Return one or many as a list; `[]` in a file of parameters comes as None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple, array)) else [value]


def _top_p(value: float) -> str:
    return '' if value > 0 else 'generation.top_p must be above 0 and at most 1; 1 switches it off.'


def _capsule(value: str) -> str:
    if value:
        try:
            check_name(value)
        except InvalidName as error:
            return f'capsules.boot: {error}'
    return ''


def _folder(value: str) -> str:
    path = os.path.expanduser(value)
    if value and '://' not in value and not os.path.isabs(path):
        return (f'capsules.directory must be an absolute path, begin with ~ or be a URL, not '
                f'{value!r}: '
                'where a node is started from is no property of the robot.')
    if '\0' in value:
        return 'capsules.directory must not hold a NUL character.'
    return ''


PARAMETERS: tuple[Spec, ...] = (
    Spec('autostart', False, 'Configure and activate at start, without a lifecycle manager.'),
    Spec('model.path', 'embedded',
         'Hugging Face directory, id of a cached hub model, embedded, random:tiny or '
         'random:qwen3.5-0.8b.', baked=True),
    Spec('model.dtype', 'auto', 'Arithmetic of the weights; auto is float32 on a CPU.',
         choices=('auto', 'float32', 'bfloat16'), baked=True),
    Spec('model.threads', 0, 'CPU threads of one step; 0 leaves the default of torch.',
         high=1024, baked=True),
    Spec('device', 'auto', 'Where the model runs; auto takes a GPU where there is one.',
         choices=('auto', 'cpu', 'cuda'), baked=True),
    Spec('thread_priority', 0, 'SCHED_FIFO priority of the thread that computes; the other '
         'threads of the node get one more. 0 leaves the policy to the system.',
         high=98, baked=True),
    Spec('cpu_affinity', -1, 'Core or cores that the threads of the node may use; -1 leaves them '
         'to the system.', low=-1, high=1023, baked=True, many=True),
    Spec('context.max_tokens', 8192, 'Tokens that a session can hold.',
         low=16, high=1 << 24, baked=True),
    Spec('sessions.max', 16, 'Sessions at a time, the default one included.',
         low=1, high=4096, baked=True),
    Spec('capsules.device_bytes', 0, 'Bytes of the capsule pool beside the model; 0: 256 MiB, or '
         'where that is more, what 16 boundaries and the rows of two contexts take.', baked=True),
    Spec('capsules.host_bytes', 0, 'Bytes of host memory that capsules move to when the pool is '
         'full; 0: none.', baked=True),
    Spec('capsules.directory', '', 'Where persisted capsules live, a path or a URL that fsspec '
         'opens; empty: nowhere, and persist is refused.', check=_folder, baked=True),
    Spec('capsules.disk_bytes', 0, 'Most bytes in capsules.directory; 0 is no limit.', baked=True),
    Spec('capsules.boot', '', 'Capsule that the default session starts from; configure fails '
         'where it is missing or does not fit.', check=_capsule, baked=True),
    Spec('capsules.persist_on_shutdown', False, 'Before shutdown and cleanup, save every session '
         'that holds tokens as <session>.last and write it to capsules.directory.'),
    Spec('generation.max_tokens', 256, 'Most tokens of an answer where a goal does not say.',
         low=1, high=1 << 24),
    Spec('generation.temperature', 0.0, 'Sampling temperature; 0 is greedy.', high=100.0),
    Spec('generation.top_p', 1.0, 'Nucleus sampling; 1 is off.', high=1.0, check=_top_p),
    Spec('generation.top_k', 0, 'Sample from the k likeliest tokens; 0 is off.', high=2 ** 31 - 1),
    Spec('generation.seed', 0, 'Seed that sessions start with.', baked=True),
    Spec('generation.draft_tokens', 0, 'Most tokens that are guessed by prompt lookup and verified '
         'at once, the same tokens either way; 0 is off. Faster on CUDA alone; 4 go into a pass.',
         high=64, baked=True),
    Spec('stream.depth', 256, 'Tokens that may wait for the publishing thread; beyond it the '
         'oldest is dropped and seq shows a gap.', low=1, high=65536),
    Spec('stream.max_rate_hz', 100.0, 'Most Token messages a second; tokens in between share a '
         'message. 0: each token has its own.', high=1e6),
    Spec('timeouts.goal', 0.0, 'Seconds from acceptance to the end of a goal that names no '
         'timeout; 0 is no limit.', high=1e9),
    Spec('timeouts.service', 5.0, 'Seconds that a service may wait for its turn where the request '
         'names none.', low=0.001, high=1e6),
    Spec('timeouts.stall', 30.0, 'Seconds without a token or chunk after which the running goal '
         'is ended with DEVICE; 0 switches the watchdog off.', high=1e6),
    Spec('timeouts.cancel', 5.0, 'Seconds that deactivate and shutdown wait for goals to reach a '
         'boundary.', low=0.1, high=1e6),
    Spec('warn.inter_token_p99', 0.0, 'Diagnostics warn above these seconds; 0: never.', high=1e6),
    Spec('error.inter_token_p99', 0.0, 'Diagnostics: error above these seconds; 0: never.',
         high=1e6),
    Spec('warn.restore_p99', 0.0, 'Diagnostics warn above these seconds; 0: never.', high=1e6),
    Spec('error.restore_p99', 0.0, 'Diagnostics: error above these seconds; 0: never.', high=1e6),
    Spec('warn.pool_use', 0.9, 'Diagnostics warn above this share of the pool; 0: never.',
         high=1.0),
    Spec('error.pool_use', 0.0, 'Diagnostics: error above this share of the pool; 0: never.',
         high=1.0),
    Spec('warn.growth_bytes', 0, 'Diagnostics warn where the process grew by more since activate; '
         '0: never.'),
    Spec('error.growth_bytes', 0, 'Diagnostics: error where the process grew by more since '
         'activate; 0: never.'),
)
_SPECS = {spec.name: spec for spec in PARAMETERS}


class Parameters:
    """
    The declared parameters of a node.

    :param node: the node that owns them.
    :param unconfigured: tells whether the node is unconfigured, where baked ones may change.
    :raises InvalidArgument: a start value (file, launch file, command line) is not allowed.
    """

    def __init__(self, node: Node, unconfigured: Callable[[], bool]) -> None:
        self._node = node
        self._unconfigured = unconfigured
        # Before the declarations: the start values pass the same validator.
        node.add_on_set_parameters_callback(self._validate)
        for spec in PARAMETERS:
            try:
                node.declare_parameter(spec.name, spec.default, spec.descriptor())
            except (InvalidParameterTypeException, InvalidParameterValueException) as error:
                given = getattr(node, '_parameter_overrides', {}).get(spec.name)
                reason = '' if given is None else spec.refusal(given.value)
                raise InvalidArgument('The node cannot start with this parameter: '
                                      f'{reason or error}') from error
        self._warn_of_strangers()

    def __getitem__(self, name: str) -> Any:
        """Return a value, floats as floats also where an integer was set."""
        value = self._node.get_parameter(name).value
        return float(value) if isinstance(_SPECS[name].default, float) else value

    def engine_config(self) -> EngineConfig:
        """Return what `configure` builds the engine from."""
        from flashrt_ros.engine import EngineConfig
        from flashrt_ros.sampling import Sampling
        return EngineConfig(
            model=os.path.expanduser(self['model.path']), dtype=self['model.dtype'],
            device=self['device'], context=self['context.max_tokens'],
            max_sessions=self['sessions.max'], pool_bytes=self['capsules.device_bytes'],
            host_bytes=self['capsules.host_bytes'],
            directory=os.path.expanduser(self['capsules.directory']),
            disk_bytes=self['capsules.disk_bytes'],
            sampling=Sampling(
                temperature=self['generation.temperature'], top_k=self['generation.top_k'],
                top_p=self['generation.top_p'], seed=self['generation.seed']),
            max_tokens=self['generation.max_tokens'],
            draft_tokens=self['generation.draft_tokens'], threads=self['model.threads'])

    def scheduling(self) -> Scheduling:
        """
        Return how `configure` schedules the threads.

        :raises InvalidArgument: the process cannot have these cores.
        """
        from flashrt_ros.node.scheduling import Scheduling
        return Scheduling(self['thread_priority'],
                          (core for core in listed(self['cpu_affinity']) if core >= 0))

    def _validate(self, parameters: Sequence[Parameter]) -> SetParametersResult:
        try:
            for parameter in parameters:
                spec = _SPECS.get(parameter.name)
                if spec is None:
                    continue  # use_sim_time, QoS overrides: not ours to judge
                reason = spec.refusal(parameter.value)
                if not reason and spec.baked and not self._unconfigured():
                    name = self._node.get_fully_qualified_name()
                    reason = (f'{spec.name} can only change while the node is unconfigured: run '
                              f'`ros2 lifecycle set {name} cleanup` first (and deactivate before, '
                              'if it is active).')
                if reason:
                    return SetParametersResult(successful=False, reason=reason)
        except Exception as error:
            return SetParametersResult(successful=False, reason=f'Cannot judge the value: {error}')
        return SetParametersResult(successful=True)

    def _warn_of_strangers(self) -> None:
        # A misspelt name in a file is dropped in silence by rclpy.
        for name in getattr(self._node, '_parameter_overrides', {}):
            known = name in _SPECS or self._node.has_parameter(name)
            if known or name.startswith('qos_overrides.'):
                continue
            near = difflib.get_close_matches(name, _SPECS, 1)
            hint = f' Did you mean {near[0]}?' if near else ''
            self._node.get_logger().warning(
                f'Parameter {name} is not known to this node and has no effect.{hint}')
