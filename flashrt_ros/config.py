"""What an engine is built from, and what can be refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
import re

import torch

from flashrt_ros.arena import Manifest
from flashrt_ros.errors import Capacity, InvalidArgument
from flashrt_ros.sampling import Sampling


@dataclass(frozen=True)
class EngineConfig:
    """
    What an engine is built from.

    :param model: ``embedded``, a Hugging Face directory, a hub id in the local cache, or
        ``random:<preset>``.
    :param dtype: ``auto`` is float32 on a CPU, the type the checkpoint declares on CUDA.
    :param context: tokens the arena holds.
    :param pool_bytes: budget of the capsule pool (device tier); 0 for what suits the model, see
        :func:`pool_budget`.
    :param host_bytes: budget of the host tier, pinned memory where the device is CUDA; 0 for none.
    :param directory: of the disk tier, a path or any URL that fsspec opens; empty for none.
    :param disk_bytes: budget of the disk tier; 0 for no limit. Over it, the least recently used
        capsules that are not pinned leave the disk.
    :param ring_tokens: a generation keeps a light boundary every so many tokens, so that undoing
        a few replays little; 0 for none.
    :param ring_boundaries: light boundaries a session keeps at most; each is a fixed block.
    :param ring_bytes: what those of one session may take, if that is less; 0 for no limit.
    :param sampling: settings of a fresh session.
    :param max_tokens: default length of a generation.
    :param draft_tokens: most tokens that are guessed by prompt lookup and verified in one pass over
        the weights, 0 for none. Tokens are the same either way; it is faster on CUDA alone, where
        four go into a pass.
    :param threads: of the CPU; 0 leaves torch's choice.
    """

    model: str = 'embedded'
    dtype: str = 'auto'
    device: str = 'auto'
    context: int = 8192
    max_sessions: int = 16
    pool_bytes: int = 0
    host_bytes: int = 0
    directory: str = ''
    disk_bytes: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    draft_tokens: int = 0
    threads: int = 0
    ring_tokens: int = 64
    ring_boundaries: int = 4
    ring_bytes: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (('context', 1, 1 << 24), ('max_sessions', 1, 4096),
                                ('pool_bytes', 0, 1 << 48), ('disk_bytes', 0, 1 << 60),
                                ('host_bytes', 0, 1 << 48), ('max_tokens', 0, 1 << 24),
                                ('draft_tokens', 0, 64),
                                ('threads', 0, 1024), ('ring_tokens', 0, 1 << 24),
                                ('ring_boundaries', 0, 1024), ('ring_bytes', 0, 1 << 48)):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise InvalidArgument(f'{name} must lie in [{low}, {high}], not {value!r}.')


def pool_budget(asked: int, manifest: Manifest, context: int) -> tuple[int, int]:
    """
    Return the bytes of the capsule pool, and the fixed blocks that it must hold.

    :param asked: a budget; 0 gives 256 MiB, or where that is more, what sixteen fixed blocks and
        the rows of two whole contexts take.
    """
    if asked:
        return asked, 8
    enough = 16 * manifest.fixed_bytes + 2 * context * manifest.row_bytes
    return max(256 << 20, enough), 16


def choose_device(name: str, tell: Callable[[str], None] = lambda words: None) -> str:
    """
    Return the torch device to run on; ``tell`` hears why ``auto`` is not a CUDA device.

    :raises InvalidArgument, DeviceFault: for a name or a device that there is not.
    """
    if name not in ('auto', 'cpu', 'cuda'):
        raise InvalidArgument(f'device must be auto, cpu or cuda, not {name!r}.')
    if name == 'cpu':
        return name
    from flashrt_ros.cuda import available
    if name == 'cuda':
        available.require()
    reason = available.why_not()
    if reason:
        tell(f'running on the CPU: {reason}')
    return 'cpu' if reason else 'cuda'


def check_memory(needed: int) -> None:
    """
    Refuse before anything is allocated what the machine has no room for.

    :param needed: bytes.
    :raises Capacity: saying how much is free.
    """
    try:
        import psutil
        available = psutil.virtual_memory().available
    except ImportError:
        return
    if needed > available:
        raise Capacity(f'the context and the capsule pool need {needed} bytes and {available} are '
                       'free; configure a smaller context.max_tokens or capsules.device_bytes.')


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """
    Type what is raised where the system refuses memory that it seemed to have.

    What is free is no promise: the limits of this process count (``ulimit -v``, strict kernels).

    :raises Capacity: saying what to configure.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and (
                'allocate memory' not in str(error)):
            raise
        size = re.search(r'ried to allocate ([\d.]+ \w+)', str(error))
        raise Capacity(
            f'the system refused {size[1] if size else "memory"} for {what}; configure a smaller '
            'model, context.max_tokens, capsules.device_bytes or capsules.host_bytes, or raise the '
            'limit of this process.') from error
