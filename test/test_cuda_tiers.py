"""
Case 32 on a device: copies between tiers run beside the tokens, and events keep their order.

A long kernel in the lane of those copies holds them back, so that whoever does not wait where it
must reads or overwrites the wrong bytes every time, and not once in a while.
"""

from engine_cases import build, DEVICE, digest, ids, poison, say
import pytest
import torch

cuda = pytest.mark.skipif(DEVICE != 'cuda', reason='needs a device: run with --device cuda')
LONG = 400_000_000  # cycles, a fifth of a second or so


@pytest.fixture
def make(tmp_path):
    engines = []

    def start(**options):
        engines.append(build(**{'directory': str(tmp_path), 'host_bytes': 64 << 20, **options}))
        return engines[-1]
    yield start
    for engine in engines:
        engine.close()


def hold_up(engine) -> None:
    """Let the lane do something long first."""
    with engine.store.lane.copying():
        torch.cuda._sleep(LONG)


def fresh(engine, seed, name, length=1500):
    engine.reset()
    engine.append(token_ids=ids(length, seed))
    engine.save(name=name)
    return digest(engine)


def alone(engine) -> None:
    """Nothing of a capsule is in the live state's trail, so its coming copies everything."""
    engine.reset()
    engine.lineage.forget()


def under_way(engine) -> bool:
    return not engine.store.lane._stream.query()


@cuda
def test_case_32_a_slow_kernel_then_a_save_in_every_tier(make):
    """What a kernel is still writing when save returns is what each tier holds."""
    engine = make()
    engine.append(token_ids=ids(900))
    torch.cuda._sleep(LONG)
    engine.arena['logits'].add_(1.0)
    engine.save(name='c', persist=True)
    engine.demote('c')  # down the lane, while the writer has its own
    wanted = digest(engine)
    engine.flush()
    alone(engine)
    for tier in ('host', 'disk'):
        assert engine.info('c').tiers[0] == tier
        poison(engine)
        engine.restore(capsule='c')
        assert digest(engine) == wanted
        alone(engine)
        while engine.info('c').tiers[0] != 'disk':
            engine.demote('c')


@cuda
def test_case_32_back_to_back_loads_through_one_staging_buffer(make):
    """The second file is not read into memory that the first upload still reads from."""
    engine = make(host_bytes=0)
    wanted = {name: fresh(engine, seed, name) for seed, name in enumerate('abc')}
    alone(engine)
    for name in wanted:
        engine.demote(name)
        assert engine.info(name).tiers == ('disk',)
    for _ in range(3):
        hold_up(engine)
        engine.restore(capsule='a')
        assert under_way(engine), 'a restore from a file does not wait for its upload'
        for name in 'bca':
            engine.restore(capsule=name)
        assert digest(engine) == wanted['a']
        for name in 'bc':
            poison(engine)
            engine.restore(capsule=name)
            assert digest(engine) == wanted[name]
        alone(engine)
        for name in wanted:
            engine.demote(name)
    engine.audit()


@cuda
def test_case_32_a_host_capsule_dropped_right_after_its_copy_began(make):
    """Its pinned pages go to the next capsule that comes down, behind the copy that reads them."""
    engine = make(host_bytes=4 << 20, pool_bytes=32 << 20)
    wanted = {name: fresh(engine, seed, name) for seed, name in enumerate('ab')}
    alone(engine)
    engine.demote('a')
    places = engine.store.find('a').on_host.pages.tolist()
    hold_up(engine)
    engine.restore(capsule='a')
    assert under_way(engine), 'a restore from the host does not wait for its copy'
    engine.drop('a')
    engine.demote('b')
    assert set(places) & set(engine.store.find('b').on_host.pages.tolist()), 'used again'
    assert digest(engine) == wanted['a']
    poison(engine)
    engine.restore(capsule='b')
    assert digest(engine) == wanted['b']
    engine.audit()


@cuda
def test_case_32_pages_that_go_down_are_not_filled_before_they_were_read(make):
    engine = make(pool_bytes=8 << 20)
    wanted = {'a': fresh(engine, 1, 'a')}
    places = set(engine.store.find('a').frozen.pages.tolist())
    alone(engine)
    hold_up(engine)
    engine.demote('a')
    assert under_way(engine), 'demoting does not wait for the copy'
    engine.append(token_ids=ids(1500, 2))
    engine.save(name='b')
    assert places & set(engine.store.find('b').frozen.pages.tolist()), 'used again'
    wanted['b'] = digest(engine)
    for name in 'ab':
        poison(engine)
        engine.restore(capsule=name)
        assert digest(engine) == wanted[name]


@cuda
def test_case_32_a_file_is_written_from_the_host_when_the_copy_down_is_done(make):
    engine = make()
    wanted = fresh(engine, 1, 'a')
    alone(engine)
    hold_up(engine)
    engine.demote('a')
    engine.demote('a')
    assert engine.info('a').tiers == ('disk',)
    poison(engine)
    engine.restore(capsule='a')
    assert digest(engine) == wanted


@cuda
def test_case_32_tokens_do_not_wait_for_what_goes_down(make):
    """Steps that take no page run while a copy to the host is still under way."""
    engine = make()
    fresh(engine, 1, 'a')
    engine.reset()
    engine.append(token_ids=ids(40, 3))
    say(engine, 3)
    engine.lineage.forget()
    hold_up(engine)
    engine.demote('a')
    step = engine.plan.step
    for _ in range(8):
        step(lambda token: None)
    torch.cuda.current_stream().synchronize()
    assert under_way(engine)
    engine.reset()


@cuda
def test_the_host_tier_is_pinned(make):
    engine = make()
    assert engine.store.host.blocks.is_pinned()
    assert all(plane.is_pinned() for plane in engine.store.host.rows.planes)
