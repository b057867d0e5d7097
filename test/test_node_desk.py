"""The desk takes requests whatever the executor does; answers leave from any thread, once."""

from pathlib import Path
import sys
import threading
import time

import pytest

rclpy = pytest.importorskip('rclpy')
sys.path.insert(0, str(Path(__file__).parent))

from node_cases import until, WAIT  # noqa: E402
from rclpy.executors import SingleThreadedExecutor  # noqa: E402
from std_srvs.srv import Trigger  # noqa: E402

from flashrt_ros.node.desk import Desk, Reply, run  # noqa: E402


@pytest.fixture
def world():
    """Return a desk that serves `~/ask`, its errors, and a function that asks."""
    context = rclpy.Context()
    rclpy.init(context=context)
    server = rclpy.create_node('server', context=context)
    asker = rclpy.create_node('asker', context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(asker)
    client = asker.create_client(Trigger, '/server/ask')

    class World:
        errors = []
        asked = served = 0
        desk = Desk(server, errors.append)

        def serve(self, handler):
            async def counted(request, response):
                try:
                    return await handler(request, response)
                finally:
                    self.served += 1
            self.desk.serve(Trigger, '~/ask', counted)
            self.desk.open()
            assert client.wait_for_service(WAIT)
            until(lambda: self.ask(0.5))  # its first answers may go nowhere
            until(lambda: self.served == self.asked)

        def ask(self, patience=WAIT):
            self.asked += 1
            future = client.call_async(Trigger.Request())
            executor.spin_until_future_complete(future, patience)
            return future.result()

    yield World()
    World.desk.close()
    executor.shutdown()
    for node in (server, asker):
        node.destroy_node()
    rclpy.shutdown(context=context)


def test_an_answer_is_given_once_and_kept():
    reply, seen = Reply(), []
    reply.then(lambda: seen.append('then'))
    assert not reply.is_set and not seen
    assert reply.set(1) and not reply.set(error=ValueError())
    assert seen == ['then'] and reply.is_set
    reply.then(lambda: seen.append('now'))
    assert seen == ['then', 'now']


def test_a_handler_goes_on_where_its_answer_is_given(world):
    """Nobody spins the node that serves."""
    threads = []

    async def handler(request, response):
        threads.append(threading.current_thread().name)
        reply = Reply()
        threading.Thread(target=lambda: (time.sleep(0.05), reply.set('words')),
                         name='who answers').start()
        response.message = await reply
        response.success = True
        threads.append(threading.current_thread().name)
        return response
    world.serve(handler)
    threads.clear()
    assert world.ask().message == 'words'
    assert threads == ['flashrt-desk', 'who answers'] and not world.errors


def test_an_answer_that_is_there_needs_no_second_thread_and_an_error_is_raised(world):
    async def handler(request, response):
        reply = Reply()
        reply.set(error=ValueError('no'))
        try:
            await reply
        except ValueError as error:
            response.message = str(error)
        return response
    world.serve(handler)
    assert world.ask().message == 'no' and not world.errors


def test_a_handler_that_fails_is_told_and_the_desk_serves_on(world):
    faults = []

    async def handler(request, response):
        if faults:
            raise faults.pop()
        return response
    world.serve(handler)
    faults.append(KeyError('broken'))
    assert world.ask(0.3) is None
    until(lambda: world.errors)
    assert [type(error) for error in world.errors] == [KeyError]
    assert world.ask() is not None


def test_a_desk_ends_when_it_is_told_to_twice_and_unopened(world):
    world.desk.close()
    world.desk.close()


def test_a_desk_that_is_closed_takes_nothing(world):
    async def handler(request, response):
        return response
    world.serve(handler)
    world.desk.close()
    assert not world.desk._thread.is_alive()
    assert world.ask(0.2) is None


def test_a_callback_of_an_action_that_waits_is_told():
    async def waits():
        await Reply()
    with pytest.raises(RuntimeError, match='must not wait'):
        run(waits())
