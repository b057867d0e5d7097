#!/usr/bin/env python3
"""
Run one step of the set-up so that it is never silent and never noisy.

Usage: step.py LOGFILE TITLE COMMAND [ARGUMENT...]

The command's output goes to the log file. Every few seconds one line tells how long the step has
run and what it does; when it fails, the end of the log is printed. The exit code is the command's.
"""
import collections
import pathlib
import subprocess
import sys
import time

PERIOD = 10.0  # seconds between two lines
TAIL = 40  # lines of the log shown after a failure


def last_line(log: pathlib.Path) -> str:
    """Return the last line of the log that says something, shortened."""
    with log.open('rb') as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors='replace').replace('\r', '\n').splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    return lines[-1][:80] if lines else ''


def main() -> int:
    """Run the command of the command line and return its exit code."""
    log, title, command = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f'{title} ...', flush=True)
    begin = time.monotonic()
    with log.open('wb') as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        while True:
            try:
                code = process.wait(PERIOD)
                break
            except subprocess.TimeoutExpired:
                print(f'{title}: {time.monotonic() - begin:3.0f} s  {last_line(log)}', flush=True)
            except KeyboardInterrupt:
                process.wait()
                return 130
    if code:
        with log.open(errors='replace') as file:
            for line in collections.deque(file, TAIL):
                print(f'  | {line.rstrip()}')
        print(f'{title}: FAILED with exit code {code}. Whole output: {log}', flush=True)
    else:
        print(f'{title}: done in {time.monotonic() - begin:.0f} s', flush=True)
    return code


if __name__ == '__main__':
    sys.exit(main())
