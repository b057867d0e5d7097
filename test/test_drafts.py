"""Drafts: guessed tokens that are verified in one pass change nothing but the time."""

from typing import ClassVar

from engine_cases import build, digest, ids, tidy
import numpy as np
import pytest

from flashrt_ros import session
from flashrt_ros.drafts import PromptLookup
from flashrt_ros.engine import Control, FinishReason, GenerateRequest

SETTINGS = [{'temperature': 0.0}, {'temperature': 0.9, 'top_k': 4, 'seed': 7}]
LOOP = [*ids(6, 3) * 8, *ids(4, 3)]


@pytest.fixture(scope='module')
def engines():
    pair = build(draft_tokens=4), build()
    yield pair
    for engine in pair:
        engine.close()


class Foresight:
    """Knows what will be said, and errs at every seventh position."""

    true: ClassVar[dict[int, int]] = {}

    def __init__(self, known, capacity):
        self._position = len(known)

    def extend(self, tokens):
        self._position += len(tokens)

    def guess(self, count):
        places = range(self._position, self._position + count)
        return [self.true[place] + (place % 7 == 0) for place in places if place in self.true]


@pytest.fixture(autouse=True, params=['lookup', 'foresight'])
def fresh(engines, request, monkeypatch):
    """A random model seldom repeats what it was told, so its drafts come from a plain run too."""
    for engine in engines:
        tidy(engine)
    Foresight.true.clear()
    if request.param == 'foresight':
        monkeypatch.setattr(session, 'PromptLookup', Foresight)


def run(engine, **options):
    """Generate; remember what was said where."""
    start = engine.session().position
    answer = engine.generate(GenerateRequest(**options))
    Foresight.true.update(enumerate(answer.token_ids, start))
    return answer


def test_case_12_a_draft_with_two_right_guesses_leaves_what_two_steps_leave(engines):
    """Recurrent, convolution and all other live bytes; on a CUDA device in one pass."""
    plain = engines[1]
    plain.append(token_ids=LOOP)
    plain.save(name='c')
    plan = plain.plan
    true = [plan.step() for _ in range(4)]
    for right in range(5):
        plain.restore(capsule='c')
        for _ in range(max(1, right)):
            plan.step()
        expected = digest(plain)
        plain.restore(capsule='c')
        draft = [*true[:right], *((token + 1) % 512 for token in true[right:])]
        said = []
        assert plan.verify(draft, said.append) == max(1, right)
        assert said == true[:max(1, right)] and digest(plain) == expected


@pytest.mark.parametrize('settings', SETTINGS)
def test_case_15_drafts_on_and_off_across_a_restore(engines, settings):
    said, ends = [], []
    for engine in reversed(engines):
        engine.append(token_ids=LOOP)
        first = run(engine, max_tokens=20, **settings).token_ids
        engine.save(name='half')
        second = run(engine, max_tokens=20).token_ids
        ends.append(digest(engine))
        engine.restore(capsule='half')
        assert run(engine, max_tokens=20).token_ids == second
        assert digest(engine) == ends[-1]
        said.append(first + second)
    assert said[0] == said[1] and ends[0] == ends[1]


def test_case_15_a_save_within_drafts_lands_on_what_was_shown(engines, request):
    engines[1].append(token_ids=LOOP)
    true = run(engines[1], max_tokens=40).token_ids
    engine, shown, found = engines[0], [], []
    engine.append(token_ids=LOOP)

    def between():
        info = engine.save(name='now', overwrite=True).info
        found.append((info.tokens, len(LOOP) + len(shown)))
    before = engine.facts()['passes']
    answer = engine.generate(GenerateRequest(max_tokens=40),
                             lambda piece: shown.extend(piece.token_ids), between=between)
    assert answer.token_ids == true and all(saved == there for saved, there in found)
    passes = engine.facts()['passes'] - before
    assert len(found) == passes
    if 'foresight' in request.node.name:
        assert passes < 20  # drafts were open in between


def test_a_rollback_into_verified_tokens_and_on(engines):
    """Replays go in blocks; the schedule knows one token after the other."""
    ends = []
    for engine in reversed(engines):
        engine.append(token_ids=LOOP)
        run(engine, max_tokens=30, temperature=0.7, top_k=3, seed=2)
        engine.rollback(to='tokens', value=11)
        middle = digest(engine)
        engine.generate(GenerateRequest(max_tokens=9))
        ends.append((middle, digest(engine)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize('limit', [1, 2, 3, 5, 7])
def test_a_draft_never_goes_past_the_limit(engines, limit):
    engines[1].append(token_ids=LOOP)
    run(engines[1], max_tokens=24 + limit)
    engine = engines[0]
    engine.append(token_ids=LOOP)
    engine.generate(GenerateRequest(max_tokens=24))
    answer = engine.generate(GenerateRequest(max_tokens=limit))
    assert len(answer.token_ids) == limit and answer.finish_reason is FinishReason.LENGTH
    assert engine.session().position == len(LOOP) + 24 + limit


def test_a_stop_string_within_a_draft_ends_there(engines):
    results = []
    for engine in reversed(engines):
        engine.append(token_ids=LOOP)
        text = run(engine, max_tokens=24).text
        tidy(engine)
        engine.append(token_ids=LOOP)
        answer = engine.generate(GenerateRequest(max_tokens=40, stop=(text[9:11],)))
        results.append((answer.token_ids, answer.text, answer.finish_reason, digest(engine)))
    assert results[0] == results[1] and results[0][2] is FinishReason.STOP


def test_a_listener_that_fails_ends_a_draft_with_its_token(engines):
    engines[1].append(token_ids=LOOP)
    run(engines[1], max_tokens=12)
    engine, shown = engines[0], []
    engine.append(token_ids=LOOP)

    def listen(piece):
        shown.extend(piece.token_ids)
        if len(shown) == 6:
            raise ValueError('no more')
    with pytest.raises(ValueError, match='no more'):
        engine.generate(GenerateRequest(max_tokens=12), listen)
    assert engine.session().position == len(LOOP) + 6
    expected = [Foresight.true[len(LOOP) + index] for index in range(6)]
    assert engine.arena['tokens'][len(LOOP):len(LOOP) + 6].view(-1).tolist() == expected


def test_the_last_row_of_the_context_may_come_by_a_draft():
    ends = []
    for draft_tokens in (0, 4):
        engine = build(context=64, draft_tokens=draft_tokens)
        engine.append(token_ids=LOOP)
        answer = run(engine, max_tokens=99)
        ends.append((answer.token_ids, engine.session().position, digest(engine)))
        engine.close()
    assert ends[0] == ends[1] and ends[0][1] == 64


def test_a_lookup_guesses_what_followed_the_latest_longest_match():
    lookup = PromptLookup(np.array([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 2, 3]), 32)
    assert lookup.guess(3) == [7, 8, 2]  # two tokens agree here and before; the later counts
    lookup.extend([4])
    assert lookup.guess(4) == [5, 9, 2, 3]  # three tokens agree
    lookup.extend([6])
    assert lookup.guess(4) == []
    assert PromptLookup(np.array([], dtype=np.int64), 4).guess(4) == []


def test_a_cancel_within_a_draft_ends_with_its_token():
    """A draft may be long where it is checked step by step."""
    plain, engine, control, shown = build(), build(draft_tokens=32), Control(), []
    plain.append(token_ids=LOOP)
    run(plain, max_tokens=40)

    def listen(piece):
        shown.extend(piece.token_ids)
        if len(shown) == 5:
            control.cancel()
    engine.append(token_ids=LOOP)
    answer = engine.generate(GenerateRequest(max_tokens=40), listen, control)
    assert answer.finish_reason is FinishReason.CANCELED
    assert len(answer.token_ids) == 5 and answer.position == len(LOOP) + 5
    plain.close()
    engine.close()
