"""Cases 4, 12, 13, 15, 29, 31 and 32: what no other file of the engine tests shows."""

from engine_cases import build, DEVICE, digest, ids, logits, poison, say, tidy
import psutil
import pytest
import torch

from flashrt_ros.control import Control
from flashrt_ros.engine import GenerateRequest
from flashrt_ros.errors import Internal
from flashrt_ros.plan import manifest_of

cuda = pytest.mark.skipif(DEVICE != 'cuda', reason='needs a device: run with --device cuda')


@pytest.fixture(scope='module')
def shared():
    engine = build()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared):
    yield shared
    tidy(shared)


@pytest.mark.parametrize('missing', ['tokens', 'logits', 'sampler.counter', 'mailbox',
                                     'layers.0.recurrent', 'layers.0.conv'])
def test_case_04_a_buffer_that_the_manifest_does_not_name(engine, missing):
    from flashrt_ros.arena import Arena, Manifest
    whole = manifest_of(engine.model, engine.model.config.vocab_size)
    assert missing in whole.by_name
    manifest = Manifest([b for b in whole.buffers[1:] if b.name != missing])
    plan = type(engine.plan)
    with pytest.raises(Exception, match=missing) as raised:
        plan(engine.model, Arena(manifest, 64, engine.arena.device))
    assert isinstance(raised.value, (Internal, KeyError, ValueError))


def test_case_12_a_block_of_four_with_two_rejected(engine):
    """Appended tokens of which half are taken back: a rollback, which replays the schedule."""
    engine.append(token_ids=ids(60))
    engine.save(name='c')
    block = ids(4, 1)
    engine.append(token_ids=block)
    engine.rollback(to='tokens', value=2)
    rejected = digest(engine)
    engine.restore(capsule='c')
    engine.append(token_ids=block[:2])
    assert digest(engine) == rejected
    block_logits = logits(engine)
    engine.restore(capsule='c')
    for token in block[:2]:
        engine.append(token_ids=[token])
    assert torch.allclose(logits(engine), block_logits, atol=1e-4), 'another schedule'


def test_case_13_a_rollback_reports_what_happened(engine):
    engine.append(token_ids=ids(1100))
    for goal, replayed in ((1030, 6), (1024, 0), (700, 188 + 0), (512, 0)):
        result = engine.rollback(to='position', value=goal)
        assert result.position == goal == engine.arena.position
        # After 1024 was passed downwards, the nearest boundary is the start.
        assert result.tokens_replayed == (replayed if goal >= 1024 else goal)


def test_case_15_what_is_saved_between_tokens_is_what_was_shown(engine):
    """Every boundary between two steps holds exactly the shown tokens."""
    engine.append(token_ids=ids(30))
    shown, found = [], []

    def between():
        info = engine.save(name='now', overwrite=True).info
        found.append((info.tokens, len(shown)))
    whole = engine.generate(GenerateRequest(max_tokens=9),
                            lambda piece: shown.extend(piece.token_ids), between=between).token_ids
    assert found == [(30 + n, n) for n in range(1, len(whole) + 1)]


def test_case_29_cancelled_at_every_moment_a_thousand_times(engine):
    """While queued, in prefill, in decode, twice, when done: the boundary before, flat memory."""
    engine.append(token_ids=ids(40))
    engine.save(name='c')
    before = digest(engine)
    free = None
    process = psutil.Process()
    for turn in range(1000):
        control, moment = Control(), turn % 4
        if moment == 0:
            control.cancel()

        def listen(piece, control=control, moment=moment):
            if moment in (2, 3):
                control.cancel()
                control.cancel()
        engine.generate(GenerateRequest(token_ids=ids(3, turn) if moment == 1 else (),
                                        max_tokens=2, rollback_on_cancel=True), listen, control)
        control.cancel()
        if moment == 1:
            engine.restore(capsule='c')
        assert engine.session().position == 40
        if turn in (100, 999):
            assert digest(engine) == before
            state = engine.lineage.pool.free(), process.memory_info().rss
            free = free or state
    assert state[0] == free[0]
    assert state[1] - free[1] < 8 << 20
    engine.audit()


def test_case_31_addresses_stay_over_a_thousand_restores(engine):
    def addresses():
        pool = engine.lineage.pool
        views = [*engine.arena.views.values(), engine.arena.fixed, pool.blocks, *pool.rows.planes]
        return [view.data_ptr() for view in views]
    before = addresses()
    engine.append(token_ids=ids(100))
    for name, more in (('a', 5), ('b', 90)):
        engine.save(name=name)
        engine.append(token_ids=ids(more, more))
    digests = {}
    for turn in range(1000):
        engine.restore(capsule='ab'[turn % 2])
        if turn < 2 or turn > 997:
            assert digests.setdefault(turn % 2, digest(engine)) == digest(engine)
    assert addresses() == before


def test_case_31_index_zero_is_a_valid_place():
    """The first capsule of a fresh engine may lie in block and page 0; a token may have id 0."""
    engine = build()
    engine.lineage.forget()
    engine.append(token_ids=[0] * 70)
    engine.save(name='c')
    places = engine.store.find('c').frozen
    assert 0 in places.pages
    before = digest(engine)
    poison(engine)
    engine.restore(capsule='c')
    assert digest(engine) == before
    engine.close()


@cuda
def test_case_31_capture_changes_no_state():
    engine = build()
    engine.append(token_ids=ids(70))
    engine.save(name='c')
    before = digest(engine)
    tokens = say(engine, 20)
    for _ in range(3):
        engine.restore(capsule='c')
        assert digest(engine) == before
        assert say(engine, 20) == tokens
    engine.close()


@cuda
def test_case_32_copies_follow_the_stream():
    """A slow kernel before a save; a capsule dropped while its copy up is under way."""
    engine = build(host_bytes=64 << 20)
    engine.append(token_ids=ids(1500))
    engine.save(name='c')
    torch.cuda._sleep(200_000_000)
    engine.arena['logits'].add_(1.0)
    engine.save(name='slow')
    wanted = digest(engine)
    for name in ('c', 'slow'):
        engine.demote(name)
    for _ in range(3):
        poison(engine)
        torch.cuda._sleep(50_000_000)
        engine.restore(capsule='slow')
        engine.demote('slow')
        engine.restore(capsule='c')
        engine.demote('c')
        engine.restore(capsule='slow')
        assert digest(engine) == wanted
        engine.demote('slow')
    engine.restore(capsule='slow')
    engine.drop('slow')
    engine.drop('c')
    assert digest(engine) == wanted
    engine.close()
