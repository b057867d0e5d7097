"""A client that does random things to its own sessions and knows what must come of each."""

from __future__ import annotations

from pathlib import Path
import random
import time

from checked import CheckedClient, PATIENCE
from ledger import Ledger
import rclpy
from reference import LONG, Reference, SCENES

from flashrt_ros.client import FlashrtClient
from flashrt_ros.errors import DeadlineExceeded, FlashrtError, NotActive

CAPSULES = 3       # of its own at a time


class RandomClient(CheckedClient):
    """Acts at random."""

    def begin(self) -> None:
        """Take over what a killed predecessor left behind."""
        for info in self.client.list():
            if info.name.startswith(self.prefix):
                self.client.drop(info.name)
        for branch in ('left', 'right'):
            try:
                self.client.close_session(f'{self.session}_{branch}')
            except FlashrtError:
                pass
        self.restore(on_busy='preempt')

    def act(self) -> None:
        """Do one thing."""
        actions = {self.restore: 3, self.answer: 8, self.from_capsule: 4, self.save: 4,
                   self.restore_own: 4, self.drop: 2, self.cancel: 5, self.back: 3, self.fork: 2,
                   self.listing: 2, self.preempt: 1, self.deadline: 1, self.sampled: 1,
                   self.refused: 2}
        action = self.dice.choices(list(actions), list(actions.values()))[0]
        name = action.__name__
        began = time.monotonic()
        try:
            action()
            self.ledger.count(name)
        except DeadlineExceeded as error:
            self.ledger.violation('stuck', action=name, error=error, state=self.state,
                                  seconds=time.monotonic() - began)
            self.restore(on_busy='preempt')
        except NotActive as error:
            self.ledger.violation('node went away', action=name, error=error)
            raise
        except FlashrtError as error:
            self.ledger.violation('unexpected refusal', action=name, code=error.code, error=error,
                                  state=self.state)
            self.restore(on_busy='preempt')

    # -- actions ----------------------------------------------------------------------------

    def answer(self) -> None:
        self._deep()
        prompt = self._pick()
        stream = self._goal(prompt)
        result = stream.result(PATIENCE)
        reached = (self.state[0], (*self.state[1], prompt))
        self.check_answer(result, self.reference.short[reached])
        self.check_stream(stream, result)
        self.check_epoch(result.epoch, False)
        self.state = reached

    def from_capsule(self) -> None:
        scene, prompt = self.dice.randrange(len(SCENES)), self._pick()
        stream = self._goal(prompt, capsule=f'scene_{scene}')
        result = stream.result(PATIENCE)
        self.state = (scene, (prompt,))
        self.check_answer(result, self.reference.short[self.state])
        self.check_stream(stream, result)
        self.check_epoch(result.epoch, True)
        self.ledger.expect(result.tokens_reused == self.reference.positions[scene, ()],
                           'reused from a capsule', found=result.tokens_reused)

    def save(self) -> None:
        if len(self.own) >= CAPSULES:
            self.drop()
        self.serial += 1
        name = f'{self.prefix}{self.serial}'
        info = self.client.save(name, self.session, persist=self.dice.random() < 0.3).info
        self.own[name] = self.state
        self.ledger.expect(info.tokens == self.reference.positions[self.state], 'saved tokens',
                           found=info.tokens, state=self.state)

    def restore_own(self) -> None:
        if not self.own:
            return self.save()
        name = self.dice.choice(list(self.own))
        response = self.client.restore(name, self.session)
        self.state = self.own[name]
        self.check_epoch(response.epoch, True)
        self.ledger.expect(response.tokens_reused == self.reference.positions[self.state],
                           'tokens of an own capsule', found=response.tokens_reused)

    def drop(self) -> None:
        if not self.own:
            return
        name = self.dice.choice(list(self.own))
        self.client.drop(name)
        del self.own[name]
        self._refusal('UNKNOWN_CAPSULE', lambda: self.client.restore(name, self.session))

    def cancel(self) -> None:
        """Cancel at a random moment, also before the goal was acknowledged."""
        self.restore()
        prompt = self._pick()
        keep = self.dice.random() < 0.5
        stream = self._goal(prompt, max_tokens=LONG, on_cancel=0 if keep else 1)
        self.pause(self.dice.choice((0.0, 0.005, 0.05, 0.2)))
        stream.cancel()
        result = stream.result(PATIENCE, check=False)
        self.ledger.count('canceled' if result.error_code else 'ended before the cancel')
        self.ledger.expect(result.error_code in (0, 42004), 'code of a cancel',
                           code=result.error_code, message=result.error_msg)
        self.check_part(result, self.reference.long[self.state[0], (prompt,)])
        here = self.reference.positions[self.state]
        if result.error_code and not keep:
            # A goal that was canceled in the queue never saw its session: epoch and position are 0.
            self.ledger.expect(result.position == (here if result.epoch else 0),
                               'position after rollback on cancel', found=result.position,
                               wanted=here)
            self.epoch = max(self.epoch, result.epoch)
        elif result.completion_tokens:
            response = self.client.rollback(position=here, session=self.session)
            self.ledger.expect(response.position == here, 'position after rollback')
            self.check_epoch(response.epoch, True)
        else:
            return self.restore()
        self.answer()  # what follows must not remember it

    def back(self) -> None:
        """Take answers back, by position, tokens or turns."""
        if not self.state[1]:
            self.answer()
        target = (self.state[0], self.state[1][:-1])
        here, there = self.reference.positions[self.state], self.reference.positions[target]
        way = self.dice.choice(('position', 'tokens', 'turns'))
        value = {'position': there, 'tokens': here - there, 'turns': 1}[way]
        response = self.client.rollback(session=self.session, **{way: value})
        self.ledger.expect(response.position == there, 'position after rollback', way=way,
                           found=response.position, wanted=there, state=self.state)
        self.check_epoch(response.epoch, True)
        self.state = target

    def fork(self) -> None:
        """Two branches answer at once; neither hears the other or the trunk."""
        self._deep()
        names = [f'{self.session}_left', f'{self.session}_right']
        self.client.fork(names, source_session=self.session)
        prompts = [self._pick(), self._pick()]
        streams = [self._goal(prompt, session=name) for prompt, name in zip(prompts, names)]
        for prompt, stream in zip(prompts, streams):
            result = stream.result(PATIENCE)
            self.check_answer(result, self.reference.short[
                self.state[0], (*self.state[1], prompt)], branch=True)
            self.check_stream(stream, result)
        for name in names:
            self.client.close_session(name)
        # A fork of the live state saves it first: that capsule is this client's to drop.
        for info in self.client.list(self.session):
            if info.name not in self.own and not info.name.startswith('scene_'):
                self.client.drop(info.name)

    def listing(self) -> None:
        found = {info.name: info.tokens for info in self.client.list()}
        for name, state in self.own.items():
            self.ledger.expect(found.get(name) == self.reference.positions[state],
                               'own capsule in the list', name=name, found=found.get(name))
        mine = {name for name in found if name.startswith(self.prefix)}
        self.ledger.expect(mine == set(self.own), 'list of own capsules', found=sorted(mine))

    def preempt(self) -> None:
        self.restore()
        first = self._goal(self._pick(), max_tokens=LONG, on_cancel=1)
        self.pause(0.05)
        prompt = self._pick()
        second = self._goal(prompt, on_busy='preempt')
        result = first.result(PATIENCE, check=False)
        later = second.result(PATIENCE)
        self.ledger.expect(result.error_code in (0, 42005), 'code of a preempted goal',
                           code=result.error_code, message=result.error_msg)
        if result.error_code == 42005:
            self.ledger.count('preempted')
            self.check_answer(later, self.reference.short[self.state[0], (prompt,)])
            self.check_stream(second, later)
        self.restore()

    def deadline(self) -> None:
        """The server ends what takes too long."""
        self.restore()
        prompt = self._pick()
        stream = self._goal(prompt, max_tokens=LONG, timeout=0.05)
        result = stream.result(PATIENCE, check=False)
        self.ledger.count('timed out' if result.error_code else 'ended before the deadline')
        self.ledger.expect(result.error_code in (0, 42003), 'code of a deadline',
                           code=result.error_code, message=result.error_msg)
        self.check_part(result, self.reference.long[self.state[0], (prompt,)])
        self.restore()

    def sampled(self) -> None:
        """The same capsule and the same seed say the same; whatever the others do meanwhile."""
        seed, prompt = self.dice.randrange(1 << 40), self._pick()
        said = []
        for _ in range(2):
            stream = self._goal(prompt, capsule='scene_1', temperature=0.9, top_k=20, seed=seed)
            result = stream.result(PATIENCE)
            self.check_stream(stream, result)
            said.append(list(result.token_ids))
        self.ledger.expect(said[0] == said[1], 'sampled answers differ', seed=seed, said=said)
        self.restore()

    def refused(self) -> None:
        """A refusal has its code and changes nothing; the next answers tell."""
        wrong = self.dice.choice((
            ('UNKNOWN_CAPSULE', lambda: self.client.restore('nobody', self.session)),
            ('INVALID_NAME', lambda: self.client.save('../up', self.session)),
            ('INVALID_ARGUMENT', lambda: self._goal(
                0, temperature=float('nan')).result(PATIENCE)),
            ('INVALID_ARGUMENT', lambda: self.client.rollback(
                position=1 << 40, session=self.session)),
            ('NAME_EXISTS', lambda: self.client.save('scene_0', self.session)),
            ('UNKNOWN_SESSION', lambda: self.client.save('x', 'nobody_here'))))
        self._refusal(*wrong)


def run(folder: Path, number: int, name: str, seed: int, seconds: float) -> int:
    """Be one client until the time is up."""
    ledger = Ledger(folder, f'client_{number}')
    rclpy.init()
    client = FlashrtClient(rclpy.create_node(f'soak_client_{number}'), name, timeout=PATIENCE)
    actor = RandomClient(client, number, Reference.load(folder / 'reference.json'), ledger,
                         random.Random(seed))
    until = time.monotonic() + seconds
    try:
        client.wait_until_active(PATIENCE)
        actor.begin()
        while time.monotonic() < until:
            actor.act()
        while actor.own:
            actor.drop()
        client.close_session(actor.session)
    except FlashrtError as error:
        ledger.violation('client ended', code=error.code, error=error)
        return 1
    finally:
        ledger.write()
        client.destroy()
        rclpy.try_shutdown()
    return 0
