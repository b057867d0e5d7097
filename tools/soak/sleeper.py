"""A subscriber that sleeps now and then: nobody is slower for it, and what it hears fits."""

from __future__ import annotations

from pathlib import Path
import random
import time

from ledger import Ledger
import rclpy
from rclpy.qos import QoSProfile, ReliabilityPolicy

from flashrt_ros.msg import CapsuleList, NodeState, Token


class Sleeper:
    """
    Checks the tokens of all goals, as far as they reach it.

    What it sleeps through is missing, which `seq` must show; nothing may be mixed up.
    """

    def __init__(self, node, name: str, ledger: Ledger) -> None:  # noqa: ANN001
        self.ledger = ledger
        self.goals: dict[bytes, Token] = {}
        qos = QoSProfile(depth=8, reliability=ReliabilityPolicy.RELIABLE)
        node.create_subscription(Token, f'{name}/tokens', self.take, qos)
        node.create_subscription(NodeState, f'{name}/state', lambda _: None, 1)
        node.create_subscription(CapsuleList, f'{name}/capsules', lambda _: None, 1)

    def take(self, token: Token) -> None:
        key = bytes(token.goal_id.uuid)
        before = self.goals.get(key)
        self.goals[key] = token
        self.ledger.count('messages of the sleeper')
        if len(self.goals) > 1000:
            self.goals.pop(next(iter(self.goals)))
        if before is None:
            return
        self.ledger.expect(token.session == before.session, 'sessions mixed in a goal')
        self.ledger.expect(token.seq > before.seq, 'seq goes back', before=before.seq,
                           after=token.seq)
        self.ledger.expect(before.finish_reason == Token.RUNNING, 'tokens after the last one')
        gap = token.seq - before.seq - 1
        self.ledger.count('messages slept through', gap)
        index = before.index + len(before.token_ids)
        fits = token.index == index if gap == 0 else token.index >= index
        if token.token_ids:
            self.ledger.expect(fits, 'index does not fit seq', gap=gap, index=token.index,
                               wanted=index)


def run(folder: Path, name: str, seed: int, seconds: float) -> int:
    """Sleep, look, sleep, until the time is up."""
    ledger = Ledger(folder, 'sleeper')
    dice = random.Random(seed)
    rclpy.init()
    node = rclpy.create_node('soak_sleeper')
    Sleeper(node, name, ledger)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        rclpy.spin_once(node, timeout_sec=0.1)
        if dice.random() < 0.02:
            ledger.count('naps')
            time.sleep(min(dice.uniform(0.5, 4.0), max(0.0, until - time.monotonic())))
    ledger.write()
    node.destroy_node()
    rclpy.try_shutdown()
    return 0
