"""`flashrt-ros bench`: the figures, measured in one run, alternating, with their spread."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flashrt_ros.cli import exits, output
from flashrt_ros.cli.opening import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    open_engine,
    SeedOption,
    ThreadsOption,
)

app = typer.Typer(no_args_is_help=True, help='Measure, and say under which conditions.')

PoolOption = Annotated[int, typer.Option(
    '--pool-mib', min=1, help='MiB of the capsule pool.')]
OracleOption = Annotated[bool, typer.Option(
    '--transformers/--no-transformers', help='Compare with transformers in the same run.')]


def _numbers(text: str, option: str, low: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(',')]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < low:
        raise typer.BadParameter(f'give numbers of at least {low}, separated by commas, not '
                                 f'{text!r}.', param_hint=option)
    return numbers


def _context(tokens: int) -> int:
    """Return room for ``tokens`` tokens and a few generated ones, in whole pages."""
    return (tokens + 64 + 63) // 64 * 64


@app.command('ttft')
def ttft(
    prefix: Annotated[str, typer.Option(
        help='Lengths of the reused prefix in tokens.')] = '2048,3000,4096,8192,16384',
    suffix: Annotated[int, typer.Option(min=1, help='Tokens behind the prefix.')] = 32,
    repeats: Annotated[int, typer.Option(min=1, help='Cold rounds for each prefix.')] = 5,
    oracle: OracleOption = True, model: ModelOption = 'embedded', dtype: DtypeOption = 'auto',
    device: DeviceOption = 'auto', threads: ThreadsOption = 0, pool_mib: PoolOption = 512,
    seed: SeedOption = 1, as_json: JsonOption = False,
) -> int:
    """
    Time to the first token: cold prefill, from a capsule, and transformers.

    `capsule_ms` is restore + append of the suffix + first sampled token, as one request, after the
    arena held another text.
    """
    from flashrt_ros.cli.benchmarks import ttft as measure
    prefixes = _numbers(prefix, '--prefix', 1)
    engine = open_engine(model, dtype=dtype, device=device, threads=threads,
                         context=_context(max(prefixes) + suffix), pool_bytes=pool_mib << 20)
    reference, sentence = _oracle(engine, oracle)
    rows = [measure.row(engine, reference, length, suffix, repeats, seed) for length in prefixes]
    return _report(engine, 'first token, milliseconds (medians)', rows, as_json, seed, sentence, {
        'prefix': 'prefix', 'cold_ms': 'cold', 'transformers_ms': 'transformers',
        'capsule_ms': 'capsule', 'capsule_p99_ms': 'its p99', 'suffix_0_ms': 'no suffix',
        'restore_ms': 'restore', 'speedup': 'speedup',
        'cold_over_transformers': 'cold / transformers'})


@app.command('capsule')
def capsule(
    position: Annotated[str, typer.Option(
        help='Positions (folded tokens) to measure at.')] = '1024,4096,16384',
    repeats: Annotated[int, typer.Option(min=1, help='Rounds for each position.')] = 50,
    model: ModelOption = 'embedded', dtype: DtypeOption = 'auto', device: DeviceOption = 'auto',
    threads: ThreadsOption = 0, pool_mib: PoolOption = 512, seed: SeedOption = 1,
    as_json: JsonOption = False,
) -> int:
    """What save, restore, fork and rollback cost, beside a plain copy of the same bytes."""
    from flashrt_ros.cli.benchmarks import capsule as measure
    positions = _numbers(position, '--position', 1)
    engine = open_engine(model, dtype=dtype, device=device, threads=threads,
                         context=_context(max(positions)), pool_bytes=pool_mib << 20)
    rows = [measure.row(engine, place, repeats, seed) for place in positions]
    return _report(engine, 'verbs, milliseconds (medians)', rows, as_json, seed, '', {
        'position': 'position', 'bytes': 'bytes', 'memcpy_ms': 'memcpy',
        'restore_full_ms': 'full restore', 'full_over_memcpy': '/ memcpy', 'save_ms': 'full save',
        'restore_lineage_ms': 'restore in family', 'fork_ms': 'fork', 'rollback_ms': 'rollback'})


@app.command('store')
def store(
    position: Annotated[str, typer.Option(
        help='Positions (folded tokens) to measure at.')] = '1024,4096,16384',
    repeats: Annotated[int, typer.Option(min=1, help='Rounds for each position.')] = 20,
    directory: Annotated[str, typer.Option(
        help='Where the disk tier is measured; a temporary directory by default.')] = '',
    model: ModelOption = 'embedded', dtype: DtypeOption = 'auto', device: DeviceOption = 'auto',
    threads: ThreadsOption = 0, pool_mib: PoolOption = 512, seed: SeedOption = 1,
    as_json: JsonOption = False,
) -> int:
    """Save and restore through each tier, beside memcpy, host copy, plain write and read."""
    from pathlib import Path
    import tempfile

    from flashrt_ros.cli.benchmarks import store as measure
    positions = _numbers(position, '--position', 1)
    with tempfile.TemporaryDirectory(dir=directory or None) as place:
        engine = open_engine(model, dtype=dtype, device=device, threads=threads, directory=place,
                             context=_context(max(positions)), pool_bytes=pool_mib << 20,
                             host_bytes=pool_mib << 20)
        rows = [measure.row(engine, Path(place), where, repeats, seed) for where in positions]
        return _report(engine, 'tiers, milliseconds (medians) and ratios to the raw medium', rows,
                       as_json, seed, '', {
                           'position': 'position', 'bytes': 'bytes',
                           'restore_device_ms': 'restore', 'restore_device_over_raw': '/ memcpy',
                           'restore_host_ms': 'from host', 'restore_host_over_raw': '/ copy',
                           'down_disk_ms': 'to disk', 'down_disk_over_raw': '/ write',
                           'restore_disk_ms': 'from disk', 'restore_disk_over_raw': '/ read',
                           'restore_disk_cold_ms': 'cold', 'restore_disk_cold_over_raw': '/ read'})


@app.command('decode')
def decode(
    position: Annotated[str, typer.Option(
        help='Positions to decode from.')] = '256,2048',
    tokens: Annotated[int, typer.Option(min=2, help='Tokens in a block.')] = 48,
    repeats: Annotated[int, typer.Option(min=1, help='Blocks of each side.')] = 5,
    oracle: OracleOption = True, model: ModelOption = 'embedded', dtype: DtypeOption = 'auto',
    device: DeviceOption = 'auto', threads: ThreadsOption = 0, pool_mib: PoolOption = 256,
    seed: SeedOption = 1, as_json: JsonOption = False,
) -> int:
    """Tokens a second, ours and transformers with its cache, in alternating blocks."""
    from flashrt_ros.cli.benchmarks import decode as measure
    positions = _numbers(position, '--position', 1)
    engine = open_engine(model, dtype=dtype, device=device, threads=threads,
                         context=_context(max(positions) + tokens), pool_bytes=pool_mib << 20)
    reference, sentence = _oracle(engine, oracle)
    rows = [measure.row(engine, reference, place, tokens, repeats, seed) for place in positions]
    return _report(engine, 'decoding (medians a token)', rows, as_json, seed, sentence, {
        'position': 'position', 'tokens_per_second': 'tokens/s', 'token_ms': 'ms a token',
        'token_p99_ms': 'p99', 'transformers_tokens_per_second': 'transformers tokens/s',
        'transformers_token_p99_ms': 'its p99', 'ratio': 'ours / theirs'})


@app.command('ros')
def ros(
    quick: Annotated[bool, typer.Option('--quick', help='Fewer repeats.')] = False,
    model: ModelOption = 'embedded', device: DeviceOption = 'auto', threads: ThreadsOption = 0,
    seed: SeedOption = 1, as_json: JsonOption = False,
) -> int:
    """What ROS costs: round trips, the way of a token, publishing; a bare peer beside each."""
    from flashrt_ros.cli.benchmarks import ros_report
    return ros_report.report(model, device, threads, seed, quick, as_json)


def _oracle(engine: Any, wanted: bool) -> tuple[Any, str]:
    if not wanted:
        return None, 'not compared: --no-transformers'
    from flashrt_ros.cli.benchmarks import oracle
    return oracle.load(engine)


def _report(engine: Any, title: str, rows: list[dict[str, Any]], as_json: bool, seed: int,
            sentence: str, columns: dict[str, str]) -> int:
    from flashrt_ros.cli.benchmarks.timing import conditions
    facts = conditions(engine, seed)
    engine.close()
    if as_json:
        output.emit({'rows': rows, **({'transformers': sentence} if sentence else {}), **facts})
        return exits.OK
    from rich.table import Table
    console = output.people()
    table = Table(title=title, box=None, pad_edge=False, header_style='bold')
    for heading in columns.values():
        table.add_column(heading, justify='right')
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in columns))
    console.print(table)
    console.print(f'[dim]{facts["model"].get("model", "")}, {facts["device"]}, {facts["cpu"]}, '
                  f'{facts["threads"]} threads, torch {facts["versions"]["torch"]}, '
                  f'{facts["prompt"]}. {sentence}[/]')
    return exits.OK


def _cell(value: Any) -> str:
    if value is None:
        return '–'
    return f'{value:,}' if isinstance(value, int) else f'{value:,.3f}'
