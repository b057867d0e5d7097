#!/usr/bin/env python3
"""
Print the versions of this environment as constraints for pip.

Run by `make lock` with the Python of .venv. What ROS 2 wheels bring along as bare Python packages
(egg-info) is left out, and so are local versions such as `+cpu`.
"""
import importlib.metadata
import re

SKIPPED = {'flashrt-ros', 'pip', 'wheel'}


def main() -> None:
    """Print the constraints."""
    print('# What was tested together; written by `make lock`.')
    lines = set()
    for dist in importlib.metadata.distributions():
        name = re.sub(r'[-_.]+', '-', dist.metadata['Name']).lower()
        from_wheel = dist.read_text('WHEEL') is not None
        if from_wheel and name not in SKIPPED:
            lines.add(f"{name}=={dist.version.split('+')[0]}")
    print('\n'.join(sorted(lines)))


if __name__ == '__main__':
    main()
