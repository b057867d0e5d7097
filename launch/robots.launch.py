"""
Start a node for each of several robots, in one ROS domain.

    ros2 launch flashrt_ros robots.launch.py
    ros2 launch flashrt_ros robots.launch.py robots:=alpha,beta,gamma params_file:=fleet.yaml

Each has a namespace of its own: /robot1/flashrt, /robot2/flashrt; and its own diagnostics topic,
/robot1/diagnostics, for those who look at one robot.
"""

from launch.actions import (
    DeclareLaunchArgument,
    GroupAction,
    IncludeLaunchDescription,
    OpaqueFunction,
)
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import SetRemap
from launch_ros.substitutions import FindPackageShare

from launch import LaunchContext, LaunchDescription

PASSED = ('params_file', 'model', 'device', 'use_sim_time', 'use_respawn', 'log_level')


def start(context: LaunchContext) -> list[GroupAction]:
    """Return one group for each robot."""
    names = LaunchConfiguration('robots').perform(context).split(',')
    source = PathJoinSubstitution([FindPackageShare('flashrt_ros'), 'launch', 'flashrt.launch.py'])
    arguments = {name: LaunchConfiguration(name) for name in PASSED}
    return [
        GroupAction([
            SetRemap('/diagnostics', f'/{name.strip()}/diagnostics'),
            IncludeLaunchDescription(
                PythonLaunchDescriptionSource(source),
                launch_arguments={**arguments, 'namespace': name.strip()}.items())])
        for name in names if name.strip()]


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the robots."""
    return LaunchDescription([
        DeclareLaunchArgument(
            'robots', default_value='robot1,robot2',
            description='Namespaces, separated by commas.'),
        DeclareLaunchArgument(
            'params_file',
            default_value=PathJoinSubstitution(
                [FindPackageShare('flashrt_ros'), 'config', 'robots.yaml']),
            description='One file for all: a robot is named there as /robot1/flashrt.'),
        DeclareLaunchArgument('model', default_value='', description='Overrides model.path.'),
        DeclareLaunchArgument('device', default_value='', description='Overrides device.'),
        DeclareLaunchArgument(
            'use_sim_time', default_value='false', description='Stamp messages with /clock.'),
        DeclareLaunchArgument(
            'use_respawn', default_value='false', description='Start a node again when it dies.'),
        DeclareLaunchArgument('log_level', default_value='info', description='Log level.'),
        OpaqueFunction(function=start),
    ])
