"""What the engine tests share: a small model, seeded ids, digests of the live state."""

import os
import random

from blake3 import blake3
import torch

from flashrt_ros.engine import Engine, EngineConfig, GenerateRequest

TINY = 'random:tiny'
DEVICE = os.environ.get('FLASHRT_TEST_DEVICE', 'cpu')  # pytest --device


def build(progress=None, **options) -> Engine:
    settings = {'model': TINY, 'context': 2048, 'pool_bytes': 32 << 20, 'threads': 1,
                'device': DEVICE, **options}
    return Engine(EngineConfig(**settings), progress)


def ids(count: int, seed: int = 0) -> list[int]:
    """Seeded token ids within the byte range of the tiny vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def digest(engine: Engine) -> str:
    """Digest of every live byte: fixed block and live rows."""
    total = blake3()
    for part in engine.arena.live_bytes():
        total.update(part.contiguous().cpu().numpy())
    return total.hexdigest()


def poison(engine: Engine) -> None:
    """Fill every byte of the arena and its scratch with noise; nothing is clean afterwards."""
    engine.arena.storage.random_(0, 256)
    engine.arena.scratch.random_(0, 256)
    engine.arena.clean = 0


def poison_dead(engine: Engine) -> None:
    """Fill all rows at and beyond the position with NaN patterns."""
    position = engine.arena.position
    for plane in engine.arena.rows.planes:
        plane[:, position:] = 0xFF  # NaN in every float format


def say(engine: Engine, count: int, session: str = 'default', **options) -> tuple[int, ...]:
    """Generate ``count`` tokens where the session stands; return the ids."""
    request = GenerateRequest(session=session, max_tokens=count, **options)
    return engine.generate(request).token_ids


def logits(engine: Engine) -> torch.Tensor:
    return engine.arena['logits'].clone()


def tidy(engine: Engine) -> None:
    """Leave a shared engine as new: no capsules, one empty session."""
    for info in engine.list():
        engine.drop(info.name)
    for session in engine.sessions():
        engine.close_session(session.name)
