"""Launch files, where launch_ros is installed; it is on a robot and not on PyPI."""

from pathlib import Path
import sys

import pytest

pytest.importorskip('rclpy')
launch_ros = pytest.importorskip(
    'launch_ros', reason='launch_ros is not installed here (it comes with ROS 2, not from PyPI)')
sys.path.insert(0, str(Path(__file__).parent))

from ament_index_python.packages import get_package_share_directory  # noqa: E402
from launch.actions import DeclareLaunchArgument  # noqa: E402
from launch.launch_description_sources import AnyLaunchDescriptionSource  # noqa: E402
from node_cases import Peer  # noqa: E402

from launch import LaunchContext, LaunchService  # noqa: E402

ARGUMENTS = ['namespace', 'params_file', 'use_sim_time', 'autostart', 'use_respawn', 'log_level',
             'model', 'device']


def describe(name):
    share = Path(get_package_share_directory('flashrt_ros'))
    source = AnyLaunchDescriptionSource(str(share / 'launch' / name))
    return source.get_launch_description(LaunchContext())


@pytest.mark.parametrize('name', ['flashrt.launch.py', 'flashrt.launch.xml',
                                  'flashrt.launch.yaml'])
def test_arguments_are_described(name):
    pairs = describe(name).get_launch_arguments()
    assert [argument.name for argument in pairs] == ARGUMENTS
    assert all(isinstance(argument, DeclareLaunchArgument) and argument.description
               for argument in pairs)


@pytest.mark.timeout(120)
def test_the_node_comes_up_in_its_namespace():
    import asyncio
    import threading

    from launch.actions import IncludeLaunchDescription

    from launch import LaunchDescription

    share = Path(get_package_share_directory('flashrt_ros'))
    include = IncludeLaunchDescription(
        AnyLaunchDescriptionSource(str(share / 'launch' / 'flashrt.launch.py')),
        launch_arguments={'namespace': 'robot7', 'model': 'random:tiny'}.items())
    service = LaunchService(noninteractive=True)
    service.include_launch_description(LaunchDescription([include]))
    peer = Peer('/robot7/flashrt')

    def check():
        try:
            peer.client.wait_until_active(60)
            results.append(peer.client.generate('x', max_tokens=2).result(20).error_code)
        finally:
            service.shutdown()

    results: list[int] = []
    thread = threading.Thread(target=check)
    thread.start()
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(service.run_async())
    finally:
        thread.join()
        loop.close()
        peer.close()
    assert results == [0]
