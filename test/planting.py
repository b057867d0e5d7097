"""
How a fault is planted so that a check cannot notice it for the wrong reason.

A plant stands where a function of the package stood. It must take what that function takes, it must
have been called, and what it raises itself is a fault of the test, not one that a check found. The
check, in turn, must say what it found: an exception that ended it is no finding.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
from inspect import Parameter
import re
from typing import Any, NamedTuple

from flashrt_ros.cli.checks import Check

TAKE_ALL = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class Plant:
    """The soil of one test: ``engine``, and a record of what was planted and what became of it."""

    def __init__(self, monkeypatch, engine) -> None:
        self.engine = engine
        self.calls: dict[str, int] = {}
        self.errors: list[str] = []  # raised by a plant itself
        self._monkeypatch = monkeypatch

    def around(self, owner: Any, name: str) -> Callable[[Callable], None]:
        """
        Put the decorated function in the place of ``owner.name``.

        It gets the original first, then the arguments. It has either the parameters of the
        original or the first of them and ``*rest, **named``.
        """
        whole = getattr(owner, name)
        form = inspect.signature(whole)
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)

        def plant(function: Callable) -> None:
            why = unfit(form, inspect.signature(function))
            if why:
                raise TypeError(f'what is planted in place of {name}{form} {why}')
            seam = f'{getattr(owner, "__name__", type(owner).__name__)}.{name}'
            self.calls[seam] = 0

            def original(*rest, **named):
                form.bind(*rest, **named)  # a wrong call is the plant's fault
                try:
                    return whole(*rest, **named)
                except BaseException as error:
                    error.through_a_plant = True  # a refusal of the package, on its way
                    raise

            @functools.wraps(whole)
            def planted(*rest, **named):
                self.calls[seam] += 1
                try:
                    return function(original, *rest, **named)
                except BaseException as error:
                    if not getattr(error, 'through_a_plant', False):
                        self.errors.append(f'{seam}: {type(error).__name__}: {error}')
                    raise

            self._monkeypatch.setattr(owner, name, staticmethod(planted) if static else planted)
        return plant


def unfit(form: inspect.Signature, planted: inspect.Signature) -> str:
    """Tell why a plant cannot take all that the original takes; '' if it can."""
    theirs = list(form.parameters.values())
    ours = [p for p in list(planted.parameters.values())[1:]]  # the first is the original itself
    explicit = [p for p in ours if p.kind not in TAKE_ALL]
    for mine, other in zip(explicit, theirs):
        if (mine.name, mine.kind, mine.default) != (other.name, other.kind, other.default):
            return f'takes {mine} where that has {other}'
    if len(explicit) > len(theirs):
        return f'takes {explicit[len(theirs)]} beyond what that has'
    rest, kinds = theirs[len(explicit):], {p.kind for p in ours}
    if rest and not kinds.issuperset(TAKE_ALL):
        return f'does not take {rest[0]}'
    return ''


class Fault(NamedTuple):
    """
    A fault and the check that has to notice it.

    :param finding: what the check has to say, as a pattern; by default what the check is about.
    :param ended: instead, the exception that ends the check, where the package itself refuses to
        go on with this fault; a pattern.
    """

    check: str
    plant: Callable[[Plant], None]
    finding: str = ''
    ended: str = ''

    @property
    def label(self) -> str:
        """Return a readable id."""
        return f'{self.check}-{self.plant.__name__}'


#: what a check says that failed by what it is about: figure, unit, detail
FINDINGS = {
    'byte_exact': r'^[1-9]\d* bytes that differ',
    'token_exact': r'^[0-7] steps with equal|; \d of 10 turns',
    'sampled_exact': r'^[0-7] sampled steps with equal',
    'cold_exact_aligned': r'^[1-9]\d* bytes that differ',
    'closed_manifest': r'^[1-9]\d* findings.* Found: ',
    'dead_rows': r'^[1-9]\d* continuations that changed',
    'immutable': r'^[1-9]\d* bytes that changed',
    'fork_divergent': r'; [0-3] of 4 equal their own run',
    'rollback': r'^[1-9]\d* bytes that differ',
    'lineage': r'^[1-9]\d* bytes that differ',
    'new_process_restore': r'^[1-9] accounts that differ.* Different: ',
    'failed_restore_untouched': r'^[1-9]\d* live bytes that changed',
    'abort_untouched': r'^[1-9]\d* live bytes that changed',
    'ablation_kv_only': r' of everything differ by [1-9]\d* bytes',
    'ablation_no_recurrent': r' of everything differ by [1-9]\d* bytes',
    'ablation_no_conv': r' of everything differ by [1-9]\d* bytes',
    'ablation_no_boundary': r' of everything differ by [1-9]\d* bytes',
    'non_lm_program': r'^[1-9]\d* bytes or actions that differ',
}


def assert_caught(fault: Fault, plant: Plant, check: Check) -> None:
    """Assert that a check noticed a fault by a finding of its own, and that there was one."""
    assert not plant.errors, f'the plant itself failed: {plant.errors[:3]}'
    assert plant.calls and all(plant.calls.values()), f'not all was planted: {plant.calls}'
    assert check.applicable and check.passed is False, check
    if fault.ended:
        assert check.figure is None and re.search(fault.ended, check.detail), check
        return
    assert check.figure is not None and check.unit, f'{check.name} found nothing: {check.detail}'
    finding = fault.finding or FINDINGS[check.name]
    assert re.search(finding, f'{check.figure} {check.unit}: {check.detail}'), (finding, check)
