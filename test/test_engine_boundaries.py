"""Acceptance group D: where a boundary lies, and what text does there."""

from engine_cases import build, DEVICE, digest, ids, logits, poison_dead, say, tidy
import pytest
import torch

from flashrt_ros.engine import FinishReason, GenerateRequest
from flashrt_ros.errors import ContextFull, InvalidArgument

CAPACITY = 1100
cuda = pytest.mark.skipif(DEVICE != 'cuda', reason='needs a device: run with --device cuda')


@pytest.fixture(scope='module')
def shared():
    engine = build(context=CAPACITY)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared):
    yield shared
    tidy(shared)


@pytest.mark.parametrize('length', [1, 511, 512, 513, 1024, CAPACITY - 1, CAPACITY])
def test_case_16_lengths(engine, length):
    assert engine.append(token_ids=ids(length)).position == length
    info = engine.save(name='c').info
    assert (info.tokens, engine.arena.position) == (length, length)
    before = digest(engine)
    assert engine.restore(capsule='c').tokens_reused == length
    assert digest(engine) == before
    if length < CAPACITY:
        assert len(say(engine, 1)) == 1


def test_case_16_an_empty_append_folds_nothing(engine):
    engine.append(token_ids=ids(20))
    before = digest(engine)
    assert engine.append(token_ids=[]).tokens_prefilled == 0
    assert engine.append(prompt='').tokens_prefilled == 0
    assert digest(engine) == before


@pytest.mark.parametrize('suffix', [1, 3, 4])  # conv window K = 4
def test_case_16_suffixes_around_the_window(engine, suffix):
    engine.append(token_ids=ids(70))
    engine.save(name='c')
    engine.append(token_ids=ids(suffix, 1))
    after = digest(engine)
    engine.append(token_ids=ids(200, 2))
    engine.restore(capsule='c')
    poison_dead(engine)
    engine.append(token_ids=ids(suffix, 1))
    assert digest(engine) == after


@cuda
def test_case_17_on_a_device_the_sampler_alone_hands_the_first_token_out():
    engine = build()
    engine.append(token_ids=ids(100))
    engine.save(name='c')
    expected = say(engine, 1)
    engine.restore(capsule='c')
    before = digest(engine)
    engine.plan._sample()  # the first kernel of a step, and none behind it
    assert (engine.arena['mailbox'].item(),) == expected
    assert digest(engine) == before, 'nothing was folded'
    engine.close()


@pytest.mark.skipif(DEVICE == 'cuda', reason='a step is a graph there; see the test above')
def test_case_17_the_first_token_needs_no_forward_pass(engine, monkeypatch):
    engine.append(token_ids=ids(100))
    engine.save(name='c')
    expected = say(engine, 1)
    engine.restore(capsule='c')
    seen = []

    def no_forward(self, tokens, position):
        raise AssertionError('a forward pass ran before the token was out')
    monkeypatch.setattr(type(engine.plan), '_fold', no_forward)
    with pytest.raises(Exception, match='forward pass'):
        engine.generate(GenerateRequest(max_tokens=1), lambda piece: seen.extend(piece.token_ids))
    assert tuple(seen) == expected


def test_case_18_eos_is_folded_once_and_going_on_works(engine):
    engine.append(token_ids=ids(60))
    engine.save(name='c')
    whole = say(engine, 12)
    end = whole[5]
    first = whole.index(end)
    engine.restore(capsule='c')
    session = engine.session()
    session._eos = frozenset({end})
    try:
        answer = engine.generate(GenerateRequest(max_tokens=12))
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids == whole[:first + 1]
        assert answer.position == 60 + first + 1
        assert session.host.turn == 'assistant_ended'
        session._eos = frozenset()
        assert say(engine, 11 - first) == whole[first + 1:]
    finally:
        session._eos = frozenset(engine.model.config.eos_token_ids)


def test_case_18_stop_strings_cut_text_never_ids(engine):
    engine.append(token_ids=ids(60))
    engine.save(name='c')
    pieces = []
    whole = engine.generate(GenerateRequest(max_tokens=30), pieces.append)
    text = whole.text
    assert len(text) > 6
    stop = text[3:5]
    engine.restore(capsule='c')
    streamed = []
    answer = engine.generate(GenerateRequest(max_tokens=30, stop=[stop]),
                             lambda piece: streamed.append(piece.text))
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text == text[:text.index(stop)] == ''.join(streamed)
    assert answer.token_ids == whole.token_ids[:len(answer.token_ids)]
    assert answer.position == 60 + len(answer.token_ids)
    rest = say(engine, 30 - len(answer.token_ids))
    assert answer.token_ids + rest == whole.token_ids


def test_case_19_a_cut_inside_a_character(engine):
    """Ids are chosen by hand: the euro sign is three bytes, here three tokens."""
    engine.append(token_ids=ids(20))
    euro = '\N{EURO SIGN}'.encode()
    session = engine.session()

    def forced(tokens):
        """Fold a token as if it were sampled: logits that leave no other choice."""
        texts = []
        for token in tokens:
            engine.arena['logits'].fill_(-1e9)
            engine.arena['logits'][token] = 0.0
            texts.append(engine.generate(GenerateRequest(max_tokens=1)).text)
        return texts
    assert forced(euro[:2]) == ['', '']
    assert session.host.detokenizer['pending'] == euro[:2].hex()
    engine.save(name='half')
    assert forced(euro[2:]) == ['\N{EURO SIGN}']
    engine.restore(capsule='half')
    assert forced([0xa5]) == ['\u20a5']  # the same two bytes, finished differently
    engine.rollback(to='tokens', value=1)
    assert session.host.detokenizer['pending'] == euro[:2].hex()
    assert forced(euro[2:]) == ['\N{EURO SIGN}']


def test_case_20_history_is_ids(engine):
    """The ids generated stay in the rows; text is never tokenised again."""
    engine.append(token_ids=ids(20))
    answer = say(engine, 15)
    engine.append(prompt='and then?', generation_prompt=True)
    rows = engine.arena['tokens'].view(-1)[:35].tolist()
    assert tuple(rows) == (*ids(20), *answer)


def test_case_21_context_full_before_anything_changes(engine):
    engine.append(token_ids=ids(CAPACITY - 10))
    engine.save(name='c')
    before = digest(engine)
    with pytest.raises(ContextFull, match='at least'):
        engine.append(token_ids=ids(11))
    with pytest.raises(ContextFull):
        engine.generate(GenerateRequest(token_ids=ids(10), max_tokens=5))
    assert digest(engine) == before
    answer = engine.generate(GenerateRequest(max_tokens=50))
    assert (answer.finish_reason, answer.position) == (FinishReason.LENGTH, CAPACITY)
    with pytest.raises(ContextFull):
        engine.generate(GenerateRequest(max_tokens=1))
    engine.restore(capsule='c')
    assert digest(engine) == before


def test_turns_are_closed_by_the_next_one(engine):
    """A turn cut by max_tokens is closed; the rendered whole equals the ids in the rows."""
    engine.append(messages=[('system', 'You plan.')])
    assert engine.session().host.turn == 'message'
    answer = engine.generate(GenerateRequest(prompt='go', max_tokens=4))
    assert engine.session().host.turn == 'assistant_open'
    engine.append(prompt='stop')
    head = engine.text.render([{'role': 'system', 'content': 'You plan.'},
                               {'role': 'user', 'content': 'go'}], True)
    rows = engine.arena['tokens'].view(-1)[:engine.arena.position].tolist()
    assert rows[:len(head)] == head
    assert tuple(rows[len(head):len(head) + 4]) == answer.token_ids
    tail = engine.text.render([{'role': 'user', 'content': 'stop'}], False, 'assistant_open')
    assert rows[len(head) + 4:] == tail


def test_aligned_save_is_cold_exact(engine):
    """Contract promise 3, with a length that is no multiple of the grid."""
    engine.append(token_ids=ids(700))
    result = engine.save(name='c', align=True)
    assert result.info.aligned
    assert result.info.tokens == 700
    say(engine, 5)
    restored = engine.restore(capsule='c')
    assert restored.tokens_reused == 512
    assert engine.append(token_ids=ids(90, 1)).tokens_prefilled == 188 + 90
    after = digest(engine)
    engine.reset()
    poison_dead(engine)
    engine.append(token_ids=ids(700) + ids(90, 1))
    assert digest(engine) == after


def test_a_plain_save_is_exact_along_its_own_schedule(engine):
    engine.append(token_ids=ids(700))
    engine.save(name='c')
    engine.append(token_ids=ids(90, 1))
    after = digest(engine)
    engine.restore(capsule='c')
    engine.append(token_ids=ids(90, 1))
    assert digest(engine) == after


def test_aligned_saves_are_refused_where_they_cannot_be(engine):
    engine.append(token_ids=ids(100))
    with pytest.raises(InvalidArgument, match='multiple of 512'):
        engine.save(name='c', align=True)
    engine.reset()
    engine.append(token_ids=ids(512))
    say(engine, 513)
    with pytest.raises(InvalidArgument, match='513 tokens back'):
        engine.save(name='c', align=True)
    assert engine.list() == []


def test_the_tail_of_an_aligned_capsule_folds_by_itself(engine):
    engine.append(token_ids=ids(600))
    expected = logits(engine)
    engine.save(name='c', align=True)
    tokens = say(engine, 6)
    engine.restore(capsule='c')
    assert engine.rollback(to='tokens', value=0).position == 512
    assert say(engine, 6) == tokens
    engine.restore(capsule='c')
    engine.rollback(to='position', value=590)
    engine.append(token_ids=ids(600)[590:])
    assert torch.equal(logits(engine), expected)
