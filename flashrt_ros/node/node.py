"""The lifecycle node: what is made, started, ended and freed, and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
import time
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn
from rclpy.lifecycle.node import LifecycleNodeMixin
from rclpy.node import Node

from flashrt_ros.errors import Canceled, DeviceFault, NotActive
from flashrt_ros.node import diagnostics
from flashrt_ros.node.alarms import Alarms
from flashrt_ros.node.desk import Desk
from flashrt_ros.node.generate import GenerateServer
from flashrt_ros.node.goals import Goals
from flashrt_ros.node.jobs import describe, report
from flashrt_ros.node.mirror import Mirror
from flashrt_ros.node.parameters import Parameters
from flashrt_ros.node.publishers import Outbox
from flashrt_ros.node.runtime import Runtime
from flashrt_ros.node.services import Services
from flashrt_ros.node.statistics import Statistics

SUCCESS = TransitionCallbackReturn.SUCCESS
FAILURE = TransitionCallbackReturn.FAILURE
ERROR = TransitionCallbackReturn.ERROR
_NEXT = {
    'unconfigured': 'configure and activate it first (`ros2 lifecycle set {name} configure`, then '
                    'activate)',
    'inactive': 'activate it first (`ros2 lifecycle set {name} activate`)',
    'finalized': 'it is shut down: start it again'}


class CapsuleNode(LifecycleNodeMixin, Node):
    """
    A language model whose whole state can be saved, restored, forked and rolled back.

    All interfaces exist from the start; outside *active* they answer NOT_ACTIVE. *configure*
    loads and allocates, *activate* takes milliseconds, *deactivate* ends the goals at a boundary
    and keeps all state, *cleanup* frees it.

    :param stopping: True once the process was told to end; a load is abandoned then.
    :raises InvalidArgument: a start value of a parameter is not allowed.
    """

    def __init__(self, stopping: Callable[[], bool] = lambda: False, **kwargs: Any) -> None:
        Node.__init__(self, 'flashrt', **kwargs)
        # Reentrant: a configure that loads for a minute must not keep parameters waiting.
        self._group = ReentrantCallbackGroup()
        LifecycleNodeMixin.__init__(self, callback_group=self._group)
        self._stopping = stopping
        self.lifecycle = 'unconfigured'
        self.failure = ''  # why the last transition failed; '' where it did not
        self.facts: dict[str, Any] = {}
        self.hardware = ''
        self.runtime: Runtime | None = None
        self._active = False
        self.statistics = Statistics()
        self.parameters = Parameters(self, self._is_unconfigured)
        self.add_post_set_parameters_callback(self._parameters_changed)
        self.alarms = Alarms(partial(self._complain, 'An alarm'))
        self.outbox = Outbox(self, self.parameters, partial(self._complain, 'Publishing'))
        self.mirror = Mirror(self)
        self.goals = Goals(self.outbox, self.alarms, self.statistics, self.mirror.refresh)
        self.desk = Desk(self, partial(self._complain, 'A request'))
        self.generate = GenerateServer(self, self.goals, self.desk)
        self.services_ = Services(self, self.goals, self.desk)
        self.diagnostics = diagnostics.Diagnostics(self)
        self.alarms.every(0.25, self._watch)
        self._timer = self.create_timer(
            diagnostics.PERIOD, self._tick, callback_group=self._group,
            clock=Clock(clock_type=ClockType.STEADY_TIME))
        self.mirror.refresh()
        self.desk.open()

    # -- what the parts ask -----------------------------------------------------------------

    def active_runtime(self) -> Runtime:
        """
        Return the runtime, where the node serves requests.

        :raises NotActive: saying what to do.
        """
        runtime = self.runtime
        if not self._active or runtime is None:
            name = self.get_fully_qualified_name()
            hint = _NEXT.get(self.lifecycle, 'wait for its transition to end').format(name=name)
            raise NotActive(f'The node is {self.lifecycle}: {hint}.')
        return runtime

    def finalized(self) -> bool:
        """Tell whether the lifecycle has come to its end."""
        return self._state_machine.current_state[1] == 'finalized'

    def transiting(self) -> bool:
        """Tell whether a transition is going on."""
        return self._state_machine.current_state[1] not in (
            'unconfigured', 'inactive', 'active', 'finalized')

    def quiet_seconds(self) -> float:
        """Return for how long the worker has been busy without a sign of progress."""
        runtime = self.runtime
        if runtime is None or not runtime.worker.busy:
            return 0.0
        last = max(runtime.worker.last_progress, self.goals.last_sign())
        return max(0.0, time.monotonic() - last)

    # -- transitions ------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Validate, load, allocate, take the boot capsule. On failure stay unconfigured."""
        try:
            self._free()
            self.runtime = Runtime(self.parameters.engine_config(),
                                   self.parameters['capsules.boot'],
                                   self.parameters.scheduling(), self.get_logger(),
                                   self._stopping)
            self.facts = self.runtime.facts
            self.hardware = str(self.facts.get('device', ''))
            self._enter('inactive')
            return SUCCESS
        except Exception as error:
            self._failed('configure', error)
            self._free()
            return FAILURE

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Begin to serve."""
        try:
            if self.runtime is None:
                raise NotActive('There is no model: clean up and configure again.')
            self.statistics.reset()
            self.diagnostics.mark()
            self.goals.open()
            self._active = True
            self._enter('active')
            return SUCCESS
        except Exception as error:
            self._failed('activate', error)
            return ERROR

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """End the goals at a boundary; all state stays."""
        try:
            if not self.end_goals('The node was deactivated'):
                raise DeviceFault('A goal did not reach a boundary within timeouts.cancel.')
            self._enter('inactive')
            return SUCCESS
        except Exception as error:
            self._failed('deactivate', error)
            return ERROR

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free model and capsules in memory."""
        try:
            self._persist()
            self._free()
            self._enter('unconfigured')
            return SUCCESS
        except Exception as error:
            self._failed('cleanup', error)
            return ERROR

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """End the goals and free everything, from whatever state."""
        try:
            self.end_goals('The node is shutting down')
            self._persist()
            self._free()
        except Exception as error:
            self._failed('shutdown', error)
        self._enter('finalized')
        return SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free everything and recover to unconfigured."""
        for step in (partial(self.end_goals, 'The node recovers from an error'), self._free):
            try:
                step()
            except Exception as error:
                # A worker that hangs in the device is left behind with its engine: a fresh
                # configure may still work, and everything else answers.
                self._failed('error processing', error)
        self.lifecycle = 'unconfigured'
        self.mirror.refresh()
        return SUCCESS

    def autostart(self) -> None:
        """Configure and activate. Never raises; a failure leaves an unconfigured node."""
        try:
            if self.trigger_configure() == SUCCESS:
                self.trigger_activate()
        except Exception as error:
            self._failed('autostart', error)

    def end_goals(self, why: str) -> bool:
        """Refuse new goals and end the open ones; return whether all ended in time."""
        self._active = False
        self.goals.close(NotActive(
            f'{why} while the goal was open: send it again when the node is active.'))
        return self.goals.wait_empty(self.parameters['timeouts.cancel'])

    def finish(self) -> None:
        """End the threads and the action server, before `destroy_node`. Never raises."""
        for step in (self._free, self.desk.close, self.alarms.close, self.outbox.close,
                     self.generate.destroy):
            try:
                step()
            except Exception as error:
                self._complain('Ending', error)

    # -- inside -----------------------------------------------------------------------------

    def _LifecycleNodeMixin__change_state(  # noqa: N802 - rclpy's own name, after mangling
            self, transition_id: int) -> TransitionCallbackReturn:
        # On Jazzy a transition that does not exist from here is let out as an exception, and the
        # client that asked for it waits for ever. Newer versions answer, as here.
        try:
            return super()._LifecycleNodeMixin__change_state(transition_id)  # type: ignore[misc]
        except rclpy_implementation.RCLError as error:
            self.get_logger().error(f'Unable to start transition {transition_id}: {error}')
            return ERROR

    def _enter(self, lifecycle: str) -> None:
        self.failure = ''
        self.lifecycle = lifecycle
        self.get_logger().info(f'Now {lifecycle}')
        self.mirror.refresh()

    def _failed(self, what: str, error: BaseException) -> None:
        self.failure = f'{what} failed, {describe(error)}'
        if isinstance(error, Canceled):
            self.get_logger().info(str(error))
            return
        self.get_logger().error(f'{what} failed, {report(error)}')

    def _complain(self, what: str, error: BaseException) -> None:
        self.get_logger().error(f'{what} failed, {report(error)}')

    def _is_unconfigured(self) -> bool:
        return self._state_machine.current_state[1] == 'unconfigured'

    def _free(self) -> None:
        self._active = False
        runtime, self.runtime = self.runtime, None
        self.facts = {}
        self.mirror.forget()
        if runtime is not None and not runtime.close(self.parameters['timeouts.cancel']):
            raise DeviceFault('The worker did not reach a boundary within timeouts.cancel.')

    def _persist(self) -> None:
        if self.runtime is None or not self.parameters['capsules.persist_on_shutdown']:
            return
        if not self.parameters['capsules.directory']:
            self.get_logger().error('capsules.persist_on_shutdown needs capsules.directory')
            return
        self.runtime.persist_sessions(60.0)

    def _parameters_changed(self, parameters: Any) -> None:
        try:
            if any(parameter.name.startswith('stream.') for parameter in parameters):
                self.outbox.reload()
        except Exception as error:
            self._complain('Taking over a parameter', error)

    def _tick(self) -> None:
        """Once a second: diagnostics, and what changed by itself, such as a finished write."""
        try:
            self.mirror.refresh()
            self.outbox.put(self.diagnostics.publish)
        except Exception as error:
            self._complain('The tick', error)

    def _watch(self) -> None:
        """End the running goal where its worker shows no sign of life."""
        limit = self.parameters['timeouts.stall']
        quiet = self.quiet_seconds()
        if not 0 < limit < quiet:
            return
        goal = self.goals.fail_running(DeviceFault(
            f'No token and no chunk came for {quiet:.1f} s (timeouts.stall): the compute device '
            'hangs or is overloaded. Look at /diagnostics; restart the node if it stays so.'))
        if goal is not None:
            self.diagnostics.stall = f'session {goal.session}, after {quiet:.1f} s'
