"""Acceptance groups C and B10: rollback, abort, cancel."""

from engine_cases import build, digest, ids, logits, poison_dead, say, tidy
import pytest
import torch

from flashrt_ros.engine import Control, FinishReason, GenerateRequest
from flashrt_ros.errors import Canceled, DeviceFault, InvalidArgument
from flashrt_ros.text import StopMatcher


@pytest.fixture(scope='module')
def shared():
    engine = build()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared):
    yield shared
    tidy(shared)


@pytest.mark.parametrize('prompt', [60, 510, 1024])
def test_case_11_back_n_generated_tokens(engine, prompt):
    engine.append(token_ids=ids(prompt))
    digests, tokens = [digest(engine)], []
    for _ in range(8):
        tokens += say(engine, 1, temperature=0.8)
        digests.append(digest(engine))
    for back in range(1, 9):
        result = engine.rollback(to='tokens', value=1)
        poison_dead(engine)
        assert result.position == prompt + 8 - back
        assert digest(engine) == digests[8 - back]
    assert tuple(tokens) == say(engine, 8, temperature=0.8)


def test_case_11_within_one_generation(engine):
    engine.append(token_ids=ids(100))
    whole = say(engine, 20, temperature=0.8, seed=3)
    for back in (1, 7, 12):
        result = engine.rollback(to='tokens', value=back)
        assert result.tokens_replayed == 20 - back
        assert say(engine, back) == whole[20 - back:]
    assert engine.rollback(to='position', value=100).tokens_replayed == 0


def test_case_11_older_capsule_after_overwriting(engine):
    engine.append(token_ids=ids(150))
    engine.save(name='old')
    before = digest(engine)
    engine.rollback(to='position', value=50)
    engine.append(token_ids=ids(120, 4))
    engine.restore(capsule='old')
    assert digest(engine) == before


def test_rollback_inside_an_append_equals_a_prefill_of_that_length(engine):
    engine.append(token_ids=ids(700))
    result = engine.rollback(to='position', value=600)
    assert result.tokens_replayed == 600 - 512, 'the kept grid boundary was not used'
    poison_dead(engine)
    after = digest(engine)
    engine.reset()
    engine.append(token_ids=ids(600))
    assert digest(engine) == after


def test_rollback_by_turns(engine):
    marks = []
    for turn in range(3):
        marks.append((digest(engine), engine.session().position))
        engine.append(token_ids=ids(40, turn))
        say(engine, 6)
    for undone in (1, 2):
        engine.rollback(to='turns', value=1)
        assert (digest(engine), engine.session().position) == marks[3 - undone]
    with pytest.raises(InvalidArgument, match='1 turns'):
        engine.rollback(to='turns', value=2)


@pytest.mark.parametrize('bad', [
    {'to': 'tokens', 'value': 61}, {'to': 'position', 'value': 61}, {'to': 'turns', 'value': 2},
    {'to': 'tokens', 'value': -1}, {'to': 'words', 'value': 1},
    {'to': 'tokens', 'value': 1, 'expected_epoch': 12345},
    {'to': 'tokens', 'value': 3, 'max_replay': 10}])
def test_case_13_a_refused_rollback_changes_nothing(engine, bad):
    engine.append(token_ids=ids(60))
    before, position = digest(engine), engine.session().position
    epoch = engine.session().epoch
    with pytest.raises(InvalidArgument):
        engine.rollback(**bad)
    assert (digest(engine), engine.session().position) == (before, position)
    assert engine.session().epoch == epoch


def test_a_fault_in_the_replay_changes_nothing(engine, monkeypatch):
    engine.append(token_ids=ids(600))
    say(engine, 4)
    before, expected = digest(engine), None
    engine.save(name='c')
    expected = say(engine, 5)
    engine.restore(capsule='c')
    fold, left = type(engine.plan)._fold, [1]

    def broken(self, tokens, position):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError('device')
        fold(self, tokens, position)
    monkeypatch.setattr(type(engine.plan), '_fold', broken)
    with pytest.raises(DeviceFault, match='replay'):
        engine.rollback(to='position', value=590)
    monkeypatch.undo()
    assert digest(engine) == before
    assert say(engine, 5) == expected


@pytest.mark.parametrize('fail_at', [0, 1, 2])
def test_case_10_an_append_that_fails_changes_nothing(engine, monkeypatch, fail_at):
    engine.append(token_ids=ids(100))
    engine.save(name='c')
    before = digest(engine)
    fold, count = type(engine.plan)._fold, [0]

    def broken(self, tokens, position):
        count[0] += 1
        fold(self, tokens, position)
        if count[0] > fail_at:
            self.arena['logits'].fill_(float('nan'))
            raise RuntimeError('in the middle')
    monkeypatch.setattr(type(engine.plan), '_fold', broken)
    with pytest.raises(DeviceFault, match='position 100'):
        engine.append(token_ids=ids(1400, 2))
    monkeypatch.undo()
    assert digest(engine) == before
    engine.append(token_ids=ids(30, 3))
    after = digest(engine)
    engine.restore(capsule='c')
    engine.append(token_ids=ids(30, 3))
    assert digest(engine) == after


def test_case_10_a_cancelled_prefill_then_a_cold_one(engine):
    control = Control()
    append, count = engine.plan.append, [0]

    class Counting:
        def __getattr__(self, name):
            return getattr(engine.plan, name)

        def append(self, tokens):
            count[0] += 1
            if count[0] == 2:
                control.cancel()
            append(tokens)
    session = engine.session()
    plan, session._plan = session._plan, Counting()
    try:
        with pytest.raises(Canceled):
            engine.append(token_ids=ids(1500), control=control)
    finally:
        session._plan = plan
    assert (count[0], session.position) == (2, 0)
    engine.append(token_ids=ids(700, 1))
    after = digest(engine)
    engine.reset()
    poison_dead(engine)
    engine.append(token_ids=ids(700, 1))
    assert digest(engine) == after


def test_a_step_that_fails_puts_the_start_of_the_generation_back(engine, monkeypatch):
    engine.append(token_ids=ids(50))
    engine.save(name='c')
    expected = say(engine, 12)
    engine.restore(capsule='c')
    step, count = type(engine.plan).step, [0]

    def broken(self, emit=None):
        count[0] += 1
        if count[0] == 5:
            self.arena['layers.0.recurrent'].fill_(float('nan'))
            raise RuntimeError('device')
        return step(self, emit)
    monkeypatch.setattr(type(engine.plan), 'step', broken)
    with pytest.raises(DeviceFault, match='position 50'):
        say(engine, 12)
    monkeypatch.undo()
    assert engine.session().position == 50
    assert say(engine, 12) == expected


@pytest.mark.parametrize('rollback', [False, True])
def test_case_29_cancel_in_decode_ends_at_a_boundary(engine, rollback):
    engine.append(token_ids=ids(50))
    engine.save(name='c')
    before = digest(engine)
    whole = say(engine, 20)
    engine.restore(capsule='c')
    control, seen = Control(), []

    def listen(piece):
        seen.extend(piece.token_ids)
        if len(seen) == 7:
            control.cancel()
    answer = engine.generate(GenerateRequest(max_tokens=20, rollback_on_cancel=rollback), listen,
                             control)
    assert answer.finish_reason is FinishReason.CANCELED
    assert answer.token_ids == tuple(seen) == whole[:7]
    if rollback:
        assert answer.position == 50
        assert digest(engine) == before
        assert say(engine, 20) == whole
    else:
        assert answer.position == 57
        assert say(engine, 13) == whole[7:]


def test_a_cancelled_or_late_request_changes_nothing(engine):
    engine.append(token_ids=ids(50))
    before = digest(engine)
    control = Control()
    control.cancel(FinishReason.PREEMPTED)
    control.cancel()
    answer = engine.generate(GenerateRequest(token_ids=ids(9)), control=control)
    assert answer.finish_reason is FinishReason.PREEMPTED
    answer = engine.generate(GenerateRequest(token_ids=ids(9)), control=Control(deadline=0.0))
    assert answer.finish_reason is FinishReason.TIMEOUT
    assert digest(engine) == before


def test_case_14_no_padding_leaks(engine):
    """A ragged chunk gives the same state whatever lies behind it."""
    digests = set()
    for fill in (0, 0xFF, 0x7F):
        engine.reset()
        for plane in engine.arena.rows.planes:
            plane.fill_(fill)
        engine.append(token_ids=ids(37))
        digests.add(digest(engine))
    assert len(digests) == 1


def test_dead_rows_may_hold_nan(engine):
    engine.append(token_ids=ids(100))
    engine.save(name='c')
    expected = say(engine, 10), logits(engine)
    engine.restore(capsule='c')
    poison_dead(engine)
    assert say(engine, 10) == expected[0]
    assert torch.equal(logits(engine), expected[1])


@pytest.mark.parametrize('value', [4, 20])  # to a kept boundary, and with a replay
def test_a_rollback_does_not_bring_an_invalid_state_back(engine, value):
    """A restore that failed half way has taken rows of the live state with it."""
    engine.append(token_ids=ids(100))
    engine.save(name='c')
    engine.append(token_ids=ids(150, 1))
    say(engine, 4)
    epoch = engine.sessions()[0].epoch
    engine.arena.valid = False  # what lineage.restore leaves behind
    with pytest.raises(DeviceFault, match='restore a capsule'):
        engine.rollback(to='tokens', value=value)
    assert not engine.arena.valid and engine.sessions()[0].epoch == epoch
    with pytest.raises(DeviceFault):
        say(engine, 1)
    engine.restore(capsule='c')
    assert engine.rollback(to='tokens', value=value).position == 100 - value
    engine.audit()


def test_a_generation_that_ends_before_its_first_token_changes_no_byte(engine):
    """Else its settings would be in the state, and the schedule would not know of them."""
    engine.append(token_ids=ids(100))
    before, control = digest(engine), Control()
    control.cancel()
    answer = engine.session().generate(
        max_tokens=4, matcher=StopMatcher(), counter=0,
        chosen={'temperature': 0.8, 'top_k': 4, 'top_p': 0.9, 'seed': 3},
        on_piece=lambda piece: None, control=control, between=lambda: None)
    assert answer.finish_reason is FinishReason.CANCELED and not answer.token_ids
    assert digest(engine) == before
