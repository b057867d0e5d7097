"""Promise 6: a refusal, a fault or a cancel leaves the live state as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
import shutil
from typing import Any, TYPE_CHECKING

from torch.utils._python_dispatch import TorchDispatchMode

from flashrt_ros.cli.checks import aborts, state
from flashrt_ros.cli.checks.base import Check, InjectedError, Sizes
from flashrt_ros.errors import Canceled, FlashrtError

if TYPE_CHECKING:
    from flashrt_ros.engine import Control, Engine


def failed_restore_untouched(engine: Engine, sizes: Sizes) -> Check:
    """A damaged file is refused with a typed error, no live byte changes; the whole one works."""
    arena = engine.arena
    state.begin(engine, sizes, length=200, salt=18)
    engine.save(name='whole', persist=True)
    engine.flush()
    want = state.snapshot(arena)
    engine.drop('whole', disk=False)
    path = _file_of(engine, sizes, 'whole')
    good = path.read_bytes()
    state.begin(engine, sizes, length=90, salt=19)
    live = state.snapshot(arena)
    refusals: dict[str, int] = {}
    wrong, silent = 0, []
    for name, damage in damages(good).items():
        _spoil(path, damage)
        try:
            engine.restore(capsule='whole')
            silent.append(name)
        except FlashrtError as error:
            refusals[type(error).__name__] = refusals.get(type(error).__name__, 0) + 1
        wrong += state.differing(live, state.snapshot(arena))
        wrong += not arena.valid
    _spoil(path, lambda file: file.write_bytes(good))
    engine.restore(capsule='whole')
    back = state.differing(want, state.snapshot(arena))
    kinds = ', '.join(f'{count} {kind}' for kind, count in sorted(refusals.items()))
    detail = (f'{len(damages(good))} kinds of damage to a file of {len(good)} bytes: {kinds}; '
              f'{state.live_size(live)} live bytes compared after each; the whole file then '
              f'restored with {back} bytes that differ.')
    if silent:
        detail += f' Restored in spite of: {", ".join(silent)}.'
    return Check('failed_restore_untouched', wrong == 0 and back == 0 and not silent,
                 wrong, 'live bytes that changed', detail)


def _file_of(engine: Engine, sizes: Sizes, name: str) -> Path:
    from flashrt_ros.capsule.codec import read_header
    for path in sorted(sizes.directory.glob('*.capsule')):
        if read_header(path).name == name:
            return path
    raise FileNotFoundError(f'no file of capsule {name!r} in {sizes.directory}')


def _spoil(path: Path, damage: Callable[[Path], Any]) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    damage(path)


def damages(good: bytes) -> dict[str, Callable[[Path], Any]]:
    """Return ways to write a damaged file: flips and cuts in every part, and non-files."""
    header = 8 + int.from_bytes(good[:8], 'little')
    payload = len(good) - header

    def flipped(offset: int) -> Callable[[Path], Any]:
        data = bytearray(good)
        data[offset] ^= 0x10
        return lambda path: path.write_bytes(data)

    def cut(size: int) -> Callable[[Path], Any]:
        return lambda path: path.write_bytes(good[:size])

    found: dict[str, Callable[[Path], Any]] = {
        'a flipped bit in the length of the header': flipped(1),
        'an empty file': cut(0), 'no file': lambda path: None,
        'a directory': lambda path: path.mkdir(),
        'trailing bytes': lambda path: path.write_bytes(good + b'\0'),
        'half a header': cut(header // 2), 'a header alone': cut(header),
        'one byte short': cut(len(good) - 1),
    }
    for part in (1, 3, 5, 7):  # eighths
        found[f'a flipped bit at {part}/8 of the header'] = flipped(8 + (header - 8) * part // 8)
        found[f'a flipped bit at {part}/8 of the payload'] = flipped(header + payload * part // 8)
        found[f'a cut at {part}/8 of the payload'] = cut(header + payload * part // 8)
    found['a flipped bit in the first byte of the payload'] = flipped(header)
    found['a flipped bit in the last byte'] = flipped(len(good) - 1)
    return found


class FaultAt(TorchDispatchMode):
    """Counts operators, and raises :class:`InjectedError` in place of one of them."""

    def __init__(self, number: int = -1) -> None:
        super().__init__()
        self.number = number
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.number:
            raise InjectedError(f'injected in place of operator {self.number}, {func}')
        return func(*args, **(kwargs or {}))


def abort_untouched(engine: Engine, sizes: Sizes) -> Check:
    """Faults in appends, generations and rollbacks, and cancels in mid-prefill: no trace."""
    from flashrt_ros.engine import GenerateRequest
    arena = engine.arena
    text = state.random_ids(arena, sizes.prompt, sizes.seed + 21)
    state.begin(engine, sizes, length=130, salt=20)
    engine.save(name='before')
    want = state.snapshot(arena)
    faults = 0
    engine.restore(capsule='before', seed=7)  # what an abort puts back is not the capsule's block
    wrong, cancels = _cancelled(engine, text, 1)
    engine.restore(capsule='before')

    def append() -> None:
        engine.append(token_ids=text)

    def speak() -> None:
        engine.generate(GenerateRequest(max_tokens=3, temperature=0.0))

    def rewind() -> None:  # into the prompt, so that some of it is folded again
        engine.rollback(to='position', value=100)

    on_device, places = arena.device.type == 'cuda', 21
    if on_device:
        outcome = aborts.inject(engine, [append, speak], want)
        wrong, faults = wrong + outcome.wrong, outcome.faults
        places = outcome.places
    else:
        for work in (append, speak, rewind):
            with FaultAt() as counted:
                work()
            engine.restore(capsule='before')
            for part in range(1, 8):
                try:
                    with FaultAt(counted.count * part // 8):
                        work()
                except (InjectedError, FlashrtError):
                    faults += 1
                wrong += state.differing(want, state.snapshot(arena)) + (not arena.valid)
    for cancel in (partial(_cancelled, chunks=0), partial(_cancelled, chunks=1), _taken_back):
        changed, heard = cancel(engine, text)
        wrong, cancels = wrong + changed, cancels + heard
        if wrong:
            engine.restore(capsule='before')  # what was left behind may leave no room to go on
    engine.append(token_ids=text)
    after = state.steps(engine, 4)
    state.begin(engine, sizes, length=130, salt=20)
    engine.append(token_ids=text)
    clean = after.equals(state.steps(engine, 4))
    return Check(
        'abort_untouched', wrong == 0 and clean and faults == places and cancels == 4, wrong,
        'live bytes that changed',
        f'{faults} faults, each {outcome.words if on_device else "in place of one operator"} in '
        f'the middle of an append{"" if on_device else ", a rollback"} or a generation, and '
        f'{cancels} cancels before and between the chunks of a prefill, one of them behind a '
        f'restore with another seed, and in an answer that is then taken back; '
        f'{state.live_size(want)} live bytes compared after each; what was appended then gives '
        f'{"the" if clean else "NOT the"} logits of an undisturbed run.')


def _cancelled(engine: Engine, text: list[int], chunks: int) -> tuple[int, int]:
    """Cancel an append behind some chunks; return bytes that changed, and 1 if it was heard."""
    from flashrt_ros.engine import Control
    control, want, heard = Control(), state.snapshot(engine.arena), False
    folded = _cancel_after(engine, control, chunks)
    try:
        engine.append(token_ids=text, control=control)
    except FlashrtError as error:
        heard = isinstance(error, Canceled)
    finally:
        engine.plan.__dict__.pop('append', None)  # the method of the class again
    changed = state.differing(want, state.snapshot(engine.arena))
    return changed + (len(folded) != chunks), heard


def _taken_back(engine: Engine, text: list[int]) -> tuple[int, bool]:
    """Cancel an answer that is to leave no trace then; return as :func:`_cancelled`."""
    from flashrt_ros.engine import Control, FinishReason, GenerateRequest
    want, host = state.snapshot(engine.arena), engine.session().host
    reason = FinishReason.STOP
    for skip in range(5):
        control = Control()
        reason = engine.generate(
            GenerateRequest(token_ids=text[skip:], max_tokens=4, rollback_on_cancel=True),
            on_piece=lambda piece, control=control: control.cancel(),  # type: ignore[misc]
            control=control).finish_reason
        if reason is not FinishReason.STOP:
            break
        engine.restore(capsule='before')  # the answer was over with its first token: another text
    changed = state.differing(want, state.snapshot(engine.arena))
    return changed + (engine.session().host != host), reason is FinishReason.CANCELED


def _cancel_after(engine: Engine, control: Control, chunks: int) -> list[int]:
    """Let ``control`` cancel once the plan has folded some chunks; return a list of these."""
    folded: list[int] = []
    append = engine.plan.append
    if not chunks:
        control.cancel()

    def counting(ids: Sequence[int]) -> None:
        append(ids)
        folded.append(len(ids))
        if len(folded) == chunks:
            control.cancel()

    engine.plan.append = counting  # type: ignore[method-assign]
    return folded
