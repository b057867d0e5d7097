#!/usr/bin/env python3
"""Run flashrt_ros/behaviours/examples/pick_and_place.py; --help tells what it does and takes."""

from flashrt_ros.behaviours.examples.pick_and_place import main

if __name__ == '__main__':
    raise SystemExit(main())
