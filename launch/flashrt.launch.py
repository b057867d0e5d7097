"""
Start the node.

    ros2 launch flashrt_ros flashrt.launch.py
    ros2 launch flashrt_ros flashrt.launch.py namespace:=robot1 model:=/path/to/model

With `namespace`, all names move below it: /robot1/flashrt/save_capsule and so on.
"""

import os

from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

from launch import LaunchContext, LaunchDescription

# Arguments that override a parameter; left empty, the params_file says.
OVERRIDES = {'model': 'model.path', 'device': 'device'}


def start(context: LaunchContext) -> list[Node]:
    """Return the node, with the overrides that were given."""
    params_file = os.path.expanduser(LaunchConfiguration('params_file').perform(context))
    if not os.path.isfile(params_file):  # launch_ros warns, and starts the node without it
        raise FileNotFoundError(f'params_file {params_file!r} is no file.')
    overrides = {
        'use_sim_time': ParameterValue(LaunchConfiguration('use_sim_time'), value_type=bool),
        'autostart': ParameterValue(LaunchConfiguration('autostart'), value_type=bool),
    }
    for argument, parameter in OVERRIDES.items():
        value = LaunchConfiguration(argument).perform(context)
        if value:
            overrides[parameter] = ParameterValue(value, value_type=str)
    return [Node(
        package='flashrt_ros',
        executable='capsule_node',
        name='flashrt',
        namespace=LaunchConfiguration('namespace'),
        output='screen',
        respawn=LaunchConfiguration('use_respawn'),
        respawn_delay=2.0,
        parameters=[params_file, overrides],
        arguments=['--ros-args', '--log-level', LaunchConfiguration('log_level')],
    )]


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node with them."""
    return LaunchDescription([
        DeclareLaunchArgument(
            'namespace', default_value='',
            description='Namespace of the node; the node itself is called flashrt.'),
        DeclareLaunchArgument(
            'params_file',
            default_value=PathJoinSubstitution(
                [FindPackageShare('flashrt_ros'), 'config', 'flashrt.yaml']),
            description='File with the parameters of the node.'),
        DeclareLaunchArgument(
            'use_sim_time', default_value='false',
            description='Stamp messages with /clock. Timeouts always run on the steady clock.'),
        DeclareLaunchArgument(
            'autostart', default_value='true',
            description='Configure and activate at start; false under a lifecycle manager.'),
        DeclareLaunchArgument(
            'use_respawn', default_value='false',
            description='Start the node again when it dies: capsules on disk and the boot capsule '
                        'come back by themselves.'),
        DeclareLaunchArgument(
            'log_level', default_value='info',
            description='Log level: debug, info, warn, error or fatal.'),
        DeclareLaunchArgument(
            'model', default_value='',
            description='Overrides model.path: embedded, a Hugging Face directory, the id of a '
                        'cached hub model, random:tiny or random:qwen3.5-0.8b.'),
        DeclareLaunchArgument(
            'device', default_value='', description='Overrides device: auto, cpu or cuda.'),
        OpaqueFunction(function=start),
    ])
