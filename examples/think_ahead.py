#!/usr/bin/env python3
"""Run flashrt_ros/behaviours/examples/think_ahead.py; --help tells what it does and takes."""

from flashrt_ros.behaviours.examples.think_ahead import main

if __name__ == '__main__':
    raise SystemExit(main())
