#!/usr/bin/env python3
"""
A soak of the node: random clients, kills and sleepers, and every answer checked.

    python -P tools/soak/soak.py --minutes 20 --out soak.json

Starts a node in a process and a ROS domain of its own, computes the answers to known prompts on a
bare engine, then lets clients generate, cancel, save, restore, fork, roll back and be refused;
kills one now and then with SIGKILL, while a subscriber sleeps. Exits with 1 on any violation: a
wrong or mixed answer, an epoch or position that does not fit, a code that does not, a call that
hangs, a goal or page that is left at the end, memory that grows.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ledger import collect, Ledger  # noqa: E402
from reference import compute, CONTEXT, Reference, SCENES  # noqa: E402

NAMESPACE = '/soak'
NODE = f'{NAMESPACE}/flashrt'
POOL = 256 << 20
GROWTH_LIMIT = 32 << 20   # bytes that a node may grow by after its warm-up
SHORT = 60.0              # seconds below which growth says nothing


def main() -> int:
    """Run the soak, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--minutes', type=float, default=20.0)
    parser.add_argument('--clients', type=int, default=4)
    parser.add_argument('--model', default='random:tiny')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--kill-every', type=float, default=15.0, help='seconds; 0: never')
    parser.add_argument('--out', type=Path, help='file for the JSON report')
    parser.add_argument('--domain', type=int, default=os.getpid() % 100 + 101)
    parser.add_argument('--role', help=argparse.SUPPRESS)
    parser.add_argument('--folder', type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.role:
        return _role(wanted)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # tidies up on the way
    with tempfile.TemporaryDirectory(prefix='flashrt-soak-') as folder:
        report = soak(wanted, Path(folder))
    text = json.dumps(report, indent=1)
    if wanted.out:
        wanted.out.write_text(text + '\n')
    report['node'].pop('curve', None)
    print(json.dumps(report, indent=1))
    return 0 if report['passed'] else 1


def _role(wanted: argparse.Namespace) -> int:
    kind, _, number = wanted.role.partition('_')
    if kind == 'client':
        import client
        return client.run(wanted.folder, int(number), NODE, wanted.seed, wanted.minutes * 60)
    if kind == 'sleeper':
        import sleeper
        return sleeper.run(wanted.folder, NODE, wanted.seed, wanted.minutes * 60)
    document = compute(wanted.model, 1)
    (wanted.folder / 'reference.json').write_text(json.dumps(document))
    return 0


class Children:
    """The processes of the run; killed ones come back with another seed."""

    def __init__(self, wanted: argparse.Namespace, folder: Path, environment: dict[str, str],
                 until: float) -> None:
        self.wanted = wanted
        self.folder = folder
        self.environment = environment
        self.until = until
        self.dice = random.Random(wanted.seed)
        self.running: dict[str, subprocess.Popen] = {}
        self.killed = 0

    def start(self, role: str) -> subprocess.Popen:
        minutes = max(0.01, (self.until - time.monotonic()) / 60)
        command = [sys.executable, '-P', str(Path(__file__).resolve()), '--role', role,
                   '--folder', str(self.folder), '--minutes', f'{minutes:.3f}',
                   '--seed', str(self.dice.randrange(1 << 30)), '--model', self.wanted.model]
        with (self.folder / f'{role}.log').open('ab') as log:
            self.running[role] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.folder)
        return self.running[role]

    def kill_one(self) -> None:
        """Kill a client in the middle of whatever it does, and start its successor."""
        role = self.dice.choice([role for role in self.running if role.startswith('client')])
        self.running[role].kill()
        self.running[role].wait()
        self.killed += 1
        self.start(role)

    def wait(self, ledger: Ledger) -> None:
        """Wait for all; one that hangs or fails is a violation."""
        for role, process in self.running.items():
            try:
                status = process.wait(150.0)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            log = (self.folder / f'{role}.log').read_text(errors='replace')
            ledger.expect(status == 0, 'a process of the soak failed', who=role, status=status,
                          log=log[-2000:])


def soak(wanted: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything in a folder and return the report."""
    from flashrt_ros.cli.show.process import NodeProcess, private_environment
    environment = private_environment(wanted.domain)
    os.environ.update(environment)
    children = Children(wanted, folder, environment, time.monotonic() + 600)
    ledger = Ledger(folder, 'soak')
    if children.start('reference').wait() != 0:
        raise SystemExit((folder / 'reference.log').read_text())
    children.running.clear()
    process = NodeProcess(
        {'autostart': True, 'model.path': wanted.model, 'model.threads': 1, 'sessions.max': 32,
         'context.max_tokens': CONTEXT, 'capsules.device_bytes': POOL, 'timeouts.service': 30.0,
         'capsules.directory': str(folder / 'capsules'),
         'stream.depth': 4096},  # a busy machine drops nothing, so that every gap is a fault
        NAMESPACE, environment, folder / 'node.log')
    process.start()
    try:
        found = _drive(wanted, children, ledger, process)
    finally:
        status = process.stop()
    ledger.expect(status == 0, 'exit code of the node', status=status, log=process.tail(20))
    log = process.log.read_text(errors='replace')
    ledger.expect('Traceback' not in log, 'a traceback in the log of the node',
                  log=log[max(0, log.find('Traceback') - 300):][:3000])
    ledger.write()
    counts, violations = collect(folder)
    return {'passed': not violations, 'minutes': wanted.minutes, 'model': wanted.model,
            'clients': wanted.clients, 'seed': wanted.seed, 'killed_clients': children.killed,
            'counts': dict(sorted(counts.items())), 'violations': violations[:50],
            'violations_total': len(violations), 'node': found}


def _drive(wanted: argparse.Namespace, children: Children, ledger: Ledger, process: Any
           ) -> dict[str, Any]:
    import rclpy
    from sampler import Sampler

    from flashrt_ros.client import FlashrtClient
    rclpy.init(domain_id=wanted.domain)
    client = FlashrtClient(rclpy.create_node('soak'), NODE, timeout=60.0)
    try:
        client.wait_until_active(120.0)
        _scenes(client, children.folder, ledger)
        sampler = Sampler(client.node, process.process.pid)
        _watch(client, sampler, 3.0)
        pool = int(sampler.values['memory']['pool_used_bytes'])
        children.until = time.monotonic() + wanted.minutes * 60
        for role in [f'client_{number}' for number in range(wanted.clients)] + ['sleeper']:
            children.start(role)
        kill_at = time.monotonic() + wanted.kill_every
        while time.monotonic() < children.until and process.running:
            _watch(client, sampler, 1.0)
            left = children.until - time.monotonic()
            if wanted.kill_every and time.monotonic() > kill_at and left > 8:
                kill_at = time.monotonic() + wanted.kill_every
                children.kill_one()
        children.wait(ledger)
        _end(client, sampler, ledger, pool)
        found = sampler.document()
        if wanted.minutes * 60 >= SHORT:
            ledger.expect(found['growth_after_warm_up'] < GROWTH_LIMIT, 'memory grows',
                          bytes=found['growth_after_warm_up'])
        ledger.expect(not found['diagnostics_errors'], 'errors in the diagnostics',
                      errors=found['diagnostics_errors'])
        return found
    finally:
        for child in children.running.values():
            if child.poll() is None:
                child.kill()
                child.wait()
        client.destroy()
        rclpy.try_shutdown()


def _scenes(client: Any, folder: Path, ledger: Ledger) -> None:
    """Fold the scenes and keep them, where all clients start from."""
    positions = Reference.load(folder / 'reference.json').positions
    for number, scene in enumerate(SCENES):
        client.reset()
        client.generate(scene, max_tokens=0).result(60.0)
        info = client.save(f'scene_{number}', pin=True).info
        ledger.expect(info.tokens == positions[number, ()], 'tokens of a scene')
    client.reset()


def _watch(client: Any, sampler: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    client.wait_for(lambda: time.monotonic() >= until, None)
    if sampler.process.is_running():
        sampler.sample()


def _end(client: Any, sampler: Any, ledger: Ledger, pool: int) -> None:
    """All clients have left and tidied up: nothing may be left of them."""
    client.cancel_all()
    names = [info.name for info in client.list()]
    ledger.expect(sorted(names) == [f'scene_{n}' for n in range(len(SCENES))],
                  'capsules that are left', names=names)
    client.reset()
    deadline = time.monotonic() + 15.0
    while time.monotonic() < deadline:
        _watch(client, sampler, 1.2)
        left = int(sampler.values['memory']['pool_used_bytes']) - pool
        goals = int(sampler.values['requests']['open goals'])
        if left <= 0 and goals == 0:
            break
    ledger.expect(goals == 0, 'goals that never ended', goals=goals)
    ledger.expect(left <= 0, 'pages that nobody owns', bytes=left)


if __name__ == '__main__':
    sys.exit(main())
