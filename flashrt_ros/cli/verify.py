"""`flashrt-ros verify`: the capsule contract, proved on this machine and this model."""

from __future__ import annotations

from pathlib import Path
import tempfile
from typing import Annotated

import typer

from flashrt_ros.cli import exits, output
from flashrt_ros.cli.opening import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    open_engine,
    pool_bytes,
    ThreadsOption,
)

FULL_CONTEXT = 2048
QUICK_CONTEXT = 1280


def verify(
    model: ModelOption = 'embedded',
    dtype: DtypeOption = 'auto',
    device: DeviceOption = 'auto',
    context: Annotated[int, typer.Option(
        min=QUICK_CONTEXT, help='Rows of the arena under test.')] = FULL_CONTEXT,
    only: Annotated[str, typer.Option(
        '--only', help='Names of the checks to run, separated by commas.')] = '',
    quick: Annotated[bool, typer.Option(
        '--quick', help='Fewer steps, cycles and operations; every check still runs.')] = False,
    cycles: Annotated[int, typer.Option(
        min=1, help='Cycles of steady_memory.')] = 10_000,
    seconds: Annotated[float, typer.Option(
        min=0.1, help='Time limit of steady_memory; the answer states the cycles done.')] = 90.0,
    threads: ThreadsOption = 0,
    as_json: JsonOption = False,
) -> int:
    """
    Prove the capsule contract on this machine and model; exit code 1 if a check fails.

    Every check states a measured figure. Capsule files go to a temporary directory. A check that
    does not apply here says so; where none of those that were named does, the exit code is 1 too.
    """
    from flashrt_ros.cli import checks
    names = list(dict.fromkeys(name.strip() for name in only.split(',') if name.strip()))
    unknown = [name for name in names if name not in checks.ALL]
    if unknown or only and not names:
        what = f'no check is called {", ".join(unknown)}' if unknown else 'it names no check'
        raise typer.BadParameter(f'{what}; there are {", ".join(checks.ALL)}.',
                                 param_hint='--only')
    with tempfile.TemporaryDirectory(prefix='flashrt-verify-') as directory:
        sizes = checks.Sizes(model=model, dtype=dtype, context=context, directory=Path(directory),
                             cycles=cycles, seconds=seconds)
        if quick:
            sizes = checks.Sizes(model=model, dtype=dtype, context=context,
                                 directory=Path(directory), prompt=600, steps=16,
                                 cycles=min(cycles, 200), seconds=seconds, operations=80)
        engine = open_engine(model, dtype=dtype, device=device, context=context,
                             directory=directory, threads=threads,
                             pool_bytes=pool_bytes(model, dtype, device, context,
                                                   rows=16 * context, blocks=40))
        try:
            facts = engine.facts()
            done = []
            table = None if as_json else _Table(facts)
            for check in checks.run(engine, sizes,
                                    names or checks.names_for(engine.arena.device.type)):
                done.append(check)
                output.log(f'{check.name}: {check.verdict} ({check.seconds:.1f} s)'
                           ) if table is None else table.add(check)
        finally:
            engine.close()
    ran = [check for check in done if check.applicable]
    passed = bool(ran) and all(check.passed for check in ran)
    if table is None:
        output.emit({'passed': passed, 'ran': len(ran),
                     'not_applicable': [check.name for check in done if not check.applicable],
                     'checks': [check.document() for check in done], 'model': facts})
    else:
        table.end(passed, len(ran), len(done) - len(ran))
    return exits.OK if passed else exits.FAILED


class _Table:
    """Prints each check as it ends: a verdict, a figure, and the sentence that explains it."""

    def __init__(self, facts: dict) -> None:
        self.console = output.people()
        self.console.print(f'[bold]The capsule contract on {facts.get("model", "this model")}[/]')

    def add(self, check) -> None:  # noqa: ANN001 - checks are imported late
        from rich.padding import Padding
        from rich.text import Text
        mark, style = ('✓', 'green') if check.passed else ('✗', 'bold red')
        if not check.applicable:
            mark, style = '–', 'dim'
        figure = '' if check.figure is None else f'{_number(check.figure)} {check.unit}'
        room = max(0, min(52, self.console.width - 37))  # beside mark, name and seconds
        line = Text.assemble((f'{mark} ', style), (f'{check.name:<26}', 'bold'),
                             (f'{figure:<{room}}', style), (f'{check.seconds:>7.1f} s', 'dim'))
        self.console.print(line)
        self.console.print(Padding(Text(check.detail, 'red' if check.passed is False else 'dim'),
                                   (0, 0, 0, 4)))

    def end(self, passed: bool, ran: int, others: int) -> None:
        words = '[bold green]All checks passed.[/]'
        if not passed:
            words = ('[bold red]At least one check failed.[/]' if ran else
                     '[bold red]No check ran, so nothing is proved.[/]')
        self.console.print(words, f'({ran} run, {others} not applicable)' if others else
                           f'({ran} run)')


def _number(value: float) -> str:
    return f'{value:,}' if isinstance(value, int) else f'{value:.4g}'
