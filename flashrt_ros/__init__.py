"""
A language model in a ROS 2 node whose whole state can be saved, restored, forked and rolled back.

``flashrt_ros.msg``, ``flashrt_ros.srv`` and ``flashrt_ros.action`` are the generated interfaces;
``flashrt_ros.engine`` is the product without ROS, ``flashrt_ros.node`` the ROS 2 node around it.
Importing this package imports none of them.
"""

__version__ = '0.1.0'
