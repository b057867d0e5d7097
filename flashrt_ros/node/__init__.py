"""
The ROS 2 node: lifecycle, services, action, topics, parameters and diagnostics.

``main.py`` starts it, ``node.py`` is the lifecycle, ``runtime.py`` what exists while it is
configured; each other module is one noun. Nothing below this package imports rclpy.
"""
