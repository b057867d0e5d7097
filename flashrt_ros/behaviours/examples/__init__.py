"""
Example trees, runnable with one command.

``python -m flashrt_ros.behaviours.examples.pick_and_place`` and ``...think_ahead``; the files in
the folder ``examples`` of the source tree and ``launch/demo.launch.py`` run these.
"""
