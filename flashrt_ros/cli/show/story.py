"""
The story of the demo: the acts, told over DDS to a node that is another process.

Every claim is tested where it is made, and every figure is read from the node's answers or from a
clock in this process; nothing that is shown was written beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
import statistics
import time
from typing import Any, TYPE_CHECKING

from flashrt_ros.cli.output import duration, megabytes
from flashrt_ros.cli.show.scenes import Scene
from flashrt_ros.cli.show.screen import Screen
from flashrt_ros.errors import DeadlineExceeded, NotActive

if TYPE_CHECKING:
    from flashrt_ros.cli.show.process import NodeProcess
    from flashrt_ros.client import FlashrtClient

ANSWER_TOKENS = 160
REPEATS = 25           # of a restore, for a median
INTERRUPT_AFTER = 4    # tokens


@dataclass
class Answer:
    """What came back for one instruction; times in seconds."""

    prompt: str
    session: str
    text: str
    token_ids: list[int]
    first_seen: float      #: from sending the goal to the first token in this process
    first_token: float     #: as the node reports it, restore and prefill included
    reused: int
    prefilled: int
    rate: float            #: tokens a second while decoding
    position: int
    finish_reason: int
    whole: bool            #: the streamed pieces add up to the result, without a gap


@dataclass
class Story:
    """Client, node, screen, and what was claimed and measured on the way."""

    client: FlashrtClient
    node: NodeProcess
    screen: Screen
    scene: Scene
    start_timeout: float  #: seconds
    claims: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)

    # -- tools ------------------------------------------------------------------------------

    def claim(self, name: str, passed: bool, text: str) -> None:
        """Record and show a claim with its outcome."""
        self.claims.append({'name': name, 'passed': bool(passed), 'detail': text})
        self.screen.claim(bool(passed), text)

    def ask(self, prompt: str, capsule: str = '', session: str = '', *,
            messages: tuple[tuple[str, str], ...] = (), cancel_after: int = 0) -> Answer:
        """Send an instruction, show the answer as it streams, return it."""
        self.screen.user(prompt, session)
        sent, first = time.monotonic(), 0.0
        stream = self.client.generate(
            '' if messages else prompt, messages=messages, capsule=capsule, session=session,
            max_tokens=ANSWER_TOKENS, temperature=0.0)
        tokens, seen = [], 0
        for token in stream:
            first = first or time.monotonic() - sent
            tokens.append(token)
            seen += len(token.token_ids)
            self.screen.stream(token.text)
            if cancel_after and seen >= cancel_after:
                stream.cancel()
        result = stream.result(timeout=30.0, check=not cancel_after)
        ids = [token_id for token in tokens for token_id in token.token_ids]
        answer = Answer(
            prompt, session, result.text, list(result.token_ids), first,
            seconds(result.time_to_first_token), result.tokens_reused, result.tokens_prefilled,
            result.tokens_per_second, result.position, result.finish_reason,
            ids == list(result.token_ids)
            and ''.join(token.text for token in tokens) == result.text)
        self.answers.append(answer)
        self.screen.end(
            ('cut off here · ' if cancel_after else '')
            + f'first token {duration(answer.first_token)} · {answer.reused} tokens reused, '
            f'{answer.prefilled} prefilled · {len(answer.token_ids)} tokens at '
            f'{answer.rate:.0f} tokens/s')
        return answer

    def start_node(self) -> None:
        """Start the node and wait until it is active."""
        begun = time.monotonic()
        pid = self.node.start()
        with self.screen.waiting(f'starting capsule_node as process {pid}'):
            self._wait_until_active(begun + self.start_timeout)
        self.costs.setdefault('node_start_s', time.monotonic() - begun)
        self.screen.note(f'process {pid} is active after '
                         f'{duration(time.monotonic() - begun)}')

    def _wait_until_active(self, deadline: float) -> None:
        while True:
            try:
                self.client.wait_until_active(min(2.0, max(0.1, deadline - time.monotonic())))
                return
            except (DeadlineExceeded, NotActive):
                refusal = self.node.refusal()
                if refusal is not None:  # it stays unconfigured, however long one waits
                    raise refusal from None
                if time.monotonic() > deadline or not self.node.running:
                    raise

    # -- the acts ---------------------------------------------------------------------------

    def tell(self) -> None:
        """Play all acts."""
        self.act_scene()
        self.act_instructions()
        self.act_interruption()
        self.act_fork()
        self.act_restart()
        self.measure()

    def act_scene(self) -> None:
        """Read the scene, answer once without a capsule, then keep the scene as one."""
        self.screen.act(1, f'The robot reads the scene: {self.scene.title}')
        first = self.scene.instructions[0]
        system = ('system', self.scene.scene)
        self.screen.note('the cold way: scene and instruction are prefilled together')
        self.cold = self.ask(first, messages=(system, ('user', first)))
        self.costs['cold_first_token_s'] = self.cold.first_token
        self.costs['cold_seen_s'] = self.cold.first_seen
        self.client.reset()
        read = self.client.generate(messages=(system,), max_tokens=0).result(timeout=60.0)
        saved = self.client.save('scene', persist=True)
        self.tokens = saved.info.tokens
        self.costs.update(save_s=seconds(saved.elapsed), capsule_bytes=saved.info.bytes,
                          save_bytes_copied=saved.bytes_copied)
        self.claim('scene', saved.info.tokens == read.position > 0,
                   f'capsule “scene”: {saved.info.tokens} tokens, '
                   f'{megabytes(saved.info.bytes)}, saved in {duration(seconds(saved.elapsed))}')

    def act_instructions(self) -> None:
        """Answer three instructions, each from the capsule."""
        self.screen.act(2, 'Three instructions, each from the restored capsule')
        self.direct = [self.ask(text, 'scene') for text in self.scene.instructions[:3]]
        self.claim('reused', all(a.reused == self.tokens for a in self.direct),
                   f'each reused all {self.tokens} tokens of the scene and prefilled its own '
                   'words only')
        self.claim('streamed', all(a.whole for a in self.answers),
                   'what streamed token by token is what the results say, without a gap')
        self.claim('same_as_cold', self.direct[0].token_ids == self.cold.token_ids,
                   'the first answer equals the one that prefilled everything')
        self.costs['restored_first_token_s'] = statistics.median(
            a.first_token for a in self.direct)
        self.costs['restored_seen_s'] = statistics.median(a.first_seen for a in self.direct)

    def act_interruption(self) -> None:
        """Interrupt an answer, go back to before the question, ask again."""
        from flashrt_ros.msg import Token
        self.screen.act(3, 'Interrupted in mid-answer, then rolled back')
        longest = max(self.direct, key=lambda a: len(a.token_ids))
        for _ in range(6):  # a fast model may be done before the cancel arrives
            cut = self.ask(longest.prompt, 'scene', cancel_after=INTERRUPT_AFTER)
            if cut.finish_reason == Token.CANCELED:
                break
        length = len(cut.token_ids)
        self.claim('interrupted', cut.finish_reason == Token.CANCELED
                   and 0 < length < len(longest.token_ids)
                   and cut.token_ids == longest.token_ids[:length],
                   f'“stop!” — cancelled after {length} of {len(longest.token_ids)} tokens, at a '
                   'committed token')
        back = self.client.rollback(turns=1)
        self.costs.update(rollback_s=seconds(back.elapsed), rollback_replayed=back.tokens_replayed)
        self.claim('rolled_back', back.position == self.tokens,
                   f'rolled back from {cut.position} to {back.position} in '
                   f'{duration(seconds(back.elapsed))}, {back.tokens_replayed} tokens replayed: '
                   'the question was never asked')
        again = self.ask(longest.prompt)
        self.claim('undisturbed', again.token_ids == longest.token_ids,
                   'asked once more without a restore, the answer is the undisturbed one')

    def act_fork(self) -> None:
        """Two branches of the scene answer two different instructions."""
        self.screen.act(4, 'Two futures from one present')
        names = ('plan_a', 'plan_b')
        forked = self.client.fork(names, 'scene')
        self.costs.update(fork_s=seconds(forked.elapsed), fork_bytes_copied=forked.bytes_copied)
        self.screen.note(f'forked into {" and ".join(names)} in '
                         f'{duration(seconds(forked.elapsed))}, {forked.bytes_copied} bytes copied')
        left, right = (self.ask(text, session=name)
                       for name, text in zip(names, self.scene.instructions[1:3], strict=True))
        self.claim('forked', left.token_ids != right.token_ids
                   and left.token_ids == self.direct[1].token_ids
                   and right.token_ids == self.direct[2].token_ids,
                   'the branches answer differently, and each as if it were the only one')

    def act_restart(self) -> None:
        """Kill the node, start another, go on from the disk."""
        from flashrt_ros.msg import CapsuleInfo
        self.screen.act(5, 'Killed, restarted, restored from disk')
        prompt = self.scene.instructions[-1]
        self.client.restore('scene')
        self.ask(self.scene.instructions[0])
        self.client.save('conversation', persist=True)
        before = self.ask(prompt)
        self._wait_for_disk('conversation', CapsuleInfo.DISK)
        pid = self.node.process.pid if self.node.process else 0
        status = self.node.kill()
        self.screen.note(f'process {pid} killed (exit code {status})')
        self.start_node()
        names = {info.name: info for info in self.client.list()}
        listed = {'scene', 'conversation'} <= names.keys() and names[
            'conversation'].tiers == CapsuleInfo.DISK
        begun = time.monotonic()
        restored = self.client.restore('conversation')
        self.costs.update(disk_restore_s=seconds(restored.elapsed),
                          disk_restore_round_trip_s=time.monotonic() - begun)
        self.claim('listed', listed and restored.tokens_reused == names['conversation'].tokens,
                   f'process {self.node.process.pid if self.node.process else 0} lists '
                   f'{len(names)} capsules on disk and restored {restored.tokens_reused} tokens '
                   f'in {duration(seconds(restored.elapsed))}')
        after = self.ask(prompt)
        self.claim('same_after_restart', after.token_ids == before.token_ids
                   and restored.info.exact_future,
                   f'all {len(after.token_ids)} tokens equal those of the process that was '
                   'killed')

    def _wait_for_disk(self, name: str, bit: int) -> None:
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            if any(info.name == name and info.tiers & bit for info in self.client.list()):
                return
            time.sleep(0.05)
        self.claim('persisted', False, f'capsule “{name}” is not on disk after 20 s')

    def measure(self) -> None:
        """Restore many times, for medians; alternately after an answer and at once."""
        elapsed, trips, copied = [], [], []
        for _ in range(REPEATS):
            begun = time.monotonic()
            answer = self.client.restore('conversation')
            trips.append(time.monotonic() - begun)
            elapsed.append(seconds(answer.elapsed))
            copied.append(answer.bytes_copied)
        self.costs.update(
            restore_s=statistics.median(elapsed), restore_p99_s=max(elapsed),
            round_trip_s=statistics.median(trips), round_trip_p99_s=max(trips),
            restore_bytes_copied=statistics.median(copied), restore_repeats=REPEATS)

    def cost_rows(self) -> list[tuple[str, str, str]]:
        """Return the table of costs for people."""
        c = self.costs
        ratio = c['cold_first_token_s'] / c['restored_first_token_s']
        return [
            ('cold first token', duration(c['cold_first_token_s']),
             f'scene of {self.tokens} tokens and instruction prefilled'),
            ('restored first token', duration(c['restored_first_token_s']),
             f'restore + instruction prefilled; {ratio:.1f} times sooner (median of 3)'),
            ('the same, seen over DDS', duration(c['restored_seen_s']),
             f'from sending the goal; cold {duration(c["cold_seen_s"])}'),
            ('capsule', megabytes(c['capsule_bytes']), f'the whole state at {self.tokens} tokens'),
            ('save', duration(c['save_s']),
             f'{megabytes(c["save_bytes_copied"])} copied; the file follows in the background'),
            ('restore, same family', duration(c['restore_s']),
             f'{megabytes(c["restore_bytes_copied"])} copied; median of {REPEATS}, worst '
             f'{duration(c["restore_p99_s"])}'),
            ('service round trip', duration(c['round_trip_s']),
             f'of such a restore; worst {duration(c["round_trip_p99_s"])}'),
            ('fork into two', duration(c['fork_s']),
             f'{megabytes(c["fork_bytes_copied"])} copied'),
            ('rollback of a turn', duration(c['rollback_s']),
             f'{int(c["rollback_replayed"])} tokens replayed'),
            ('restore from disk', duration(c['disk_restore_s']),
             'read, every digest checked, copied'),
        ]


def seconds(message: Any) -> float:
    """Return a duration message as a number."""
    return message.sec + message.nanosec * 1e-9
