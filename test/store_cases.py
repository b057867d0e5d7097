"""What the tests of the store share; `make`, which starts its engines, is in conftest.py."""

from engine_cases import digest, ids

MIB = 1 << 20


def fresh(engine, length, seed, name, **options):
    """Save an unrelated text under a name; return the digest of its state."""
    engine.reset()
    engine.append(token_ids=ids(length, seed))
    engine.save(name=name, **options)
    return digest(engine)


def tiers(engine):
    return {i.name: i.tiers for i in engine.list()}


def size_of(tmp_path, name):
    return (tmp_path / 'capsules' / f'{name}.capsule').stat().st_size
