"""The desk: where the requests of the services come in, and from where they are answered."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack
from functools import partial
import threading
import time
from typing import Any, Generic, TYPE_CHECKING, TypeVar

from rclpy.callback_groups import CallbackGroup
from rclpy.guard_condition import GuardCondition
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.waitable import NumberOfEntities

from flashrt_ros.stream import CALLS_QOS

if TYPE_CHECKING:
    from rclpy.node import Node
    from rclpy.service import Service
    from rclpy.waitable import Waitable

T = TypeVar('T')
Handler = Callable[[Any, Any], Coroutine['Reply[Any]', None, Any]]


class Reply(Generic[T]):
    """
    An answer that a handler waits for; `set` works from any thread, once.

    The handler goes on in the thread that answers: it must be quick, and must not wait there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._then: Callable[[], None] | None = None

    @property
    def is_set(self) -> bool:
        """True once it is answered."""
        return self._outcome is not None

    def set(self, value: T | None = None, error: BaseException | None = None) -> bool:
        """Answer; return whether this was the first answer."""
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = value, error
            then, self._then = self._then, None
        if then is not None:
            then()
        return True

    def then(self, function: Callable[[], None]) -> None:
        """Call a function as soon as the answer is there, which may be now."""
        with self._lock:
            if self._outcome is None:
                self._then = function
                return
        function()

    def __await__(self) -> Generator[Reply[T], None, T]:
        """Wait for the answer and return it, or raise what was set as its error."""
        if self._outcome is None:
            yield self
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def run(coroutine: Coroutine[Any, None, None]) -> None:
    """Run a coroutine that awaits nothing that is not there."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError('a callback of an action must not wait')


class _Elsewhere(CallbackGroup):
    """Keeps what is served at the desk out of the wait sets of the executor."""

    def can_execute(self, entity: Any) -> bool:
        return False

    def beginning_execution(self, entity: Any) -> bool:
        return False

    def ending_execution(self, entity: Any) -> None:
        pass


class Desk:
    """
    Services and actions of a node, served by a thread of their own instead of by its executor.

    For each call rclpy's executor makes three wait sets over all that the node has, and passes
    the call on twice: together more than half of what a call costs. Here the wait set is made
    once, and a handler that waited goes on in the thread that has the answer, and sends it.

    Handlers are coroutines that await nothing but a `Reply`; callbacks of actions do not wait.

    :param node: whose services these are; it destroys them, after `close`.
    :param on_error: told of what fails on the way.
    """

    def __init__(self, node: Node, on_error: Callable[[BaseException], None]) -> None:
        self._node = node
        self._on_error = on_error
        self.group: CallbackGroup = _Elsewhere()
        self._waitables: list[Waitable[Any]] = []
        self._services: list[tuple[Service, Handler]] = []
        self._guard = GuardCondition(None, None, context=node.context)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name='flashrt-desk')

    def serve(self, kind: Any, name: str, handler: Handler) -> None:
        """Make a service, before `open`; `handler` fills its response and returns it."""
        service = self._node.create_service(
            kind, name, self._never, qos_profile=CALLS_QOS, callback_group=self.group)
        self._services.append((service, handler))

    def add(self, waitable: Waitable[Any]) -> None:
        """Serve what was made in `group` too, such as an action server, before `open`."""
        self._waitables.append(waitable)

    def open(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Take no more requests and end the thread. Idempotent."""
        self._closing = True
        if self._thread.is_alive():
            self._guard.trigger()
            self._thread.join()
            self._guard.destroy()

    def _run(self) -> None:
        context: Any = self._node.context.handle
        services: list[Any] = [service.handle for service, _ in self._services]
        with ExitStack() as held:
            for handle in (context, self._guard.handle, *services, *self._waitables):
                held.enter_context(handle)
            count = NumberOfEntities(0, 1, 0, 0, len(services))
            for waitable in self._waitables:
                count += waitable.get_num_entities()
            self._serve(rclpy_implementation.WaitSet(
                count.num_subscriptions, count.num_guard_conditions, count.num_timers,
                count.num_clients, count.num_services, count.num_events, context))

    def _serve(self, wait_set: Any) -> None:
        while not self._closing and self._node.context.ok():
            try:
                wait_set.clear_entities()
                wait_set.add_guard_condition(self._guard.handle)
                for service, _ in self._services:
                    wait_set.add_service(service.handle)
                for waitable in self._waitables:
                    waitable.add_to_wait_set(wait_set)
                wait_set.wait(-1)
                ready = wait_set.get_ready_entities('service')
                others = [waitable for waitable in self._waitables if waitable.is_ready(wait_set)]
            except Exception as error:
                self._on_error(error)
                time.sleep(0.1)  # not without pause, should it go on
                continue
            for service, handler in self._services:
                if service.handle.pointer in ready:
                    self._take(service, handler)
            for waitable in others:
                try:
                    run(waitable.execute(waitable.take_data()))
                except Exception as error:
                    self._on_error(error)

    def _take(self, service: Any, handler: Handler) -> None:
        try:
            request, header = service.handle.service_take_request(service.srv_type.Request)
        except Exception as error:
            self._on_error(error)
            return
        if header is not None:
            self._go_on(service, header, handler(request, service.srv_type.Response()))

    def _go_on(self, service: Any, header: Any, handler: Coroutine[Reply[Any], None, Any]) -> None:
        """Run a handler up to where it waits, or to its end. On the thread that answered it."""
        try:
            reply = handler.send(None)
        except StopIteration as end:
            try:
                service.send_response(end.value, header)
            except Exception as error:  # who asked has gone away
                self._on_error(error)
        except Exception as error:
            self._on_error(error)
        else:
            reply.then(partial(self._go_on, service, header, handler))

    @staticmethod
    def _never(request: Any, response: Any) -> Any:
        return response
