"""
Start the node under Nav2's lifecycle manager, which configures and activates it.

    ros2 launch flashrt_ros nav2.launch.py
    ros2 launch flashrt_ros nav2.launch.py namespace:=robot1 service_timeout:=300.0

The manager is of the package nav2_lifecycle_manager.
"""

from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

from launch import LaunchDescription

PASSED = ('namespace', 'model', 'device', 'use_sim_time', 'log_level')


def generate_launch_description() -> LaunchDescription:
    """Start the manager, and include the node with autostart off."""
    share = FindPackageShare('flashrt_ros')
    return LaunchDescription([
        DeclareLaunchArgument(
            'namespace', default_value='', description='Namespace of node and manager.'),
        DeclareLaunchArgument('model', default_value='', description='Overrides model.path.'),
        DeclareLaunchArgument('device', default_value='', description='Overrides device.'),
        DeclareLaunchArgument(
            'use_sim_time', default_value='false', description='Stamp messages with /clock.'),
        DeclareLaunchArgument('log_level', default_value='info', description='Log level.'),
        DeclareLaunchArgument(
            'service_timeout', default_value='120.0',
            description='Seconds that a transition may take: above the time to load the model.'),
        # First: where Nav2 is not installed the launch ends here, and no node is left behind.
        Node(
            package='nav2_lifecycle_manager',
            executable='lifecycle_manager',
            name='lifecycle_manager_flashrt',
            namespace=LaunchConfiguration('namespace'),
            output='screen',
            parameters=[
                PathJoinSubstitution([share, 'config', 'nav2_lifecycle_manager.yaml']),
                {'service_timeout': ParameterValue(
                    LaunchConfiguration('service_timeout'), value_type=float)}]),
        IncludeLaunchDescription(
            PythonLaunchDescriptionSource(
                PathJoinSubstitution([share, 'launch', 'flashrt.launch.py'])),
            launch_arguments={
                **{name: LaunchConfiguration(name) for name in PASSED},
                'autostart': 'false'}.items()),
    ])
