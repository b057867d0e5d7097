"""
Start the node and an example behaviour tree beside it.

    ros2 launch flashrt_ros demo.launch.py
    ros2 launch flashrt_ros demo.launch.py tree:=think_ahead
    ros2 launch flashrt_ros demo.launch.py fail:=pick:mug_5*1 namespace:=robot1

The model is the embedded planner, whose skills the trees know. The launch ends with the tree.
`ros2 topic echo /flashrt/tokens` in another terminal shows the planner speak.
"""

import sys

from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    ExecuteProcess,
    IncludeLaunchDescription,
    OpaqueFunction,
    RegisterEventHandler,
)
from launch.event_handlers import OnProcessExit
from launch.events import Shutdown
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity

TREES = ('pick_and_place', 'think_ahead')


def start_tree(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """Return the process that ticks the tree, and the end of the launch when it ends."""
    tree = LaunchConfiguration('tree').perform(context)
    namespace = LaunchConfiguration('namespace').perform(context).strip('/')
    server = f'/{namespace}/flashrt' if namespace else '/flashrt'
    # With the Python that runs this launch file: it finds what ros2 finds. Not from the present
    # directory, in which the source tree may lie, without the generated interfaces.
    command = [sys.executable, '-m', f'flashrt_ros.behaviours.examples.{tree}', '--server', server]
    if tree == 'pick_and_place':
        command += ['--fail', LaunchConfiguration('fail').perform(context)]
    process = ExecuteProcess(
        cmd=command, name=tree, output='screen',
        additional_env={'PYTHONSAFEPATH': '1', 'PYTHONUNBUFFERED': '1'})
    return [process, RegisterEventHandler(OnProcessExit(
        target_action=process, on_exit=[EmitEvent(event=Shutdown(reason='the tree has ended'))]))]


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments, start the node and the tree."""
    return LaunchDescription([
        DeclareLaunchArgument(
            'tree', default_value=TREES[0], choices=TREES,
            description='The example tree, of flashrt_ros/behaviours/examples.'),
        DeclareLaunchArgument(
            'fail', default_value='pick:mug_5',
            description='What fails on purpose in pick_and_place: SKILL[:OBJECT][*TIMES], or '
                        'none.'),
        DeclareLaunchArgument(
            'namespace', default_value='',
            description='Namespace of the node; the node itself is called flashrt.'),
        IncludeLaunchDescription(
            PythonLaunchDescriptionSource(PathJoinSubstitution(
                [FindPackageShare('flashrt_ros'), 'launch', 'flashrt.launch.py'])),
            launch_arguments={'namespace': LaunchConfiguration('namespace'),
                              'model': 'embedded'}.items()),
        OpaqueFunction(function=start_tree),
    ])
