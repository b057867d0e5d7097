"""`flashrt-ros bench`: the figures, measured in one run, alternating, with their spread."""

from __future__ import annotations

from collections.abc import Iterator
import gc
import json
from pathlib import Path
import tempfile
from typing import Annotated, Any

import typer

from flashrt_ros.cli import exits, output
from flashrt_ros.cli.opening import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    open_engine,
    pool_bytes,
    SeedOption,
    ThreadsOption,
)
from flashrt_ros.errors import Storage

app = typer.Typer(no_args_is_help=True, help='Measure, and say under which conditions.')

PoolOption = Annotated[int, typer.Option(
    '--pool-mib', min=0, help='MiB of the capsule pool; 0 for what the run needs on a CUDA '
    'device, and 512 on a CPU.')]
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


def _pool(pool_mib: int, model: str, dtype: str, device: str, context: int, rows: int,
          blocks: int = 24) -> int:
    """Return the bytes of a pool for so many rows and blocks, if the user named none."""
    if pool_mib:
        return pool_mib << 20
    return pool_bytes(model, dtype, device, context, rows=rows, blocks=blocks, least=512 << 20)


def _peak(engine: Any) -> dict[str, Any] | None:
    """Return the ceiling of a CUDA device, None on a CPU."""
    from flashrt_ros.cli.benchmarks import device
    return device.ceiling(engine.arena.device) if device.on_device(engine) else None


@app.command('ttft')
def ttft(
    prefix: Annotated[str, typer.Option(
        help='Lengths of the reused prefix in tokens.')] = '2048,3000,4096,8192,16384',
    suffix: Annotated[str, typer.Option(
        help='Lengths behind the prefix; 0 is measured beside each.')] = '32',
    repeats: Annotated[int, typer.Option(min=1, help='Cold rounds for each prefix.')] = 5,
    oracle: OracleOption = True, model: ModelOption = 'embedded', dtype: DtypeOption = 'auto',
    device: DeviceOption = 'auto', threads: ThreadsOption = 0, pool_mib: PoolOption = 0,
    seed: SeedOption = 1, as_json: JsonOption = False,
) -> int:
    """
    Time to the first token: cold prefill, from a capsule, and transformers.

    `capsule_ms` is restore + append of the suffix + first sampled token, as one request, after the
    arena held another text.
    """
    from flashrt_ros.cli.benchmarks import ttft as measure
    prefixes, suffixes = _numbers(prefix, '--prefix', 1), _numbers(suffix, '--suffix', 0)
    suffixes = [length for length in suffixes if length] or [0]
    context = _context(max(prefixes) + max(suffixes))
    engine = open_engine(
        model, dtype=dtype, device=device, threads=threads, context=context,
        pool_bytes=_pool(pool_mib, model, dtype, device, context, 2 * context))
    reference, sentence = _oracle(engine, oracle)
    peak = _peak(engine)
    rows = _rows(measure.row(engine, reference, length, tail, repeats, seed, peak)
                 for length in prefixes for tail in suffixes)
    return _report(engine, 'first token, milliseconds (medians)', rows, as_json, seed, sentence, {
        'prefix': 'prefix', 'cold_ms': 'cold', 'transformers_ms': 'transformers',
        'capsule_ms': 'capsule', 'capsule_p99_ms': 'its p99', 'suffix_0_ms': 'no suffix',
        'restore_ms': 'restore', 'speedup': 'speedup',
        'cold_over_transformers': 'cold / transformers',
        **({'capsule_over_floor': '/ floor'} if peak else {})}, peak)


@app.command('capsule')
def capsule(
    position: Annotated[str, typer.Option(
        help='Positions (folded tokens) to measure at.')] = '1024,4096,16384',
    repeats: Annotated[int, typer.Option(min=1, help='Rounds for each position.')] = 50,
    model: ModelOption = 'embedded', dtype: DtypeOption = 'auto', device: DeviceOption = 'auto',
    threads: ThreadsOption = 0, pool_mib: PoolOption = 0, seed: SeedOption = 1,
    as_json: JsonOption = False,
) -> int:
    """What save, restore, fork and rollback cost, beside a plain copy of the same bytes."""
    from flashrt_ros.cli.benchmarks import capsule as measure
    positions = _numbers(position, '--position', 1)
    context = _context(max(positions))
    engine = open_engine(
        model, dtype=dtype, device=device, threads=threads, context=context,
        pool_bytes=_pool(pool_mib, model, dtype, device, context, 5 * context))
    peak = _peak(engine)
    rows = _rows(measure.row(engine, place, repeats, seed) for place in positions)
    return _report(engine, 'verbs, milliseconds (medians)', rows, as_json, seed, '', {
        'position': 'position', 'bytes': 'bytes', 'memcpy_ms': 'memcpy',
        'restore_full_ms': 'full restore', 'full_over_memcpy': '/ memcpy', 'save_ms': 'full save',
        'restore_lineage_ms': 'restore in family', 'fork_ms': 'fork', 'rollback_ms': 'rollback'},
                   peak)


@app.command('store')
def store(
    position: Annotated[str, typer.Option(
        help='Positions (folded tokens) to measure at.')] = '1024,4096,16384',
    repeats: Annotated[int, typer.Option(min=1, help='Rounds for each position.')] = 20,
    directory: Annotated[str, typer.Option(
        help='Where the disk tier is measured; a temporary directory by default.')] = '',
    model: ModelOption = 'embedded', dtype: DtypeOption = 'auto', device: DeviceOption = 'auto',
    threads: ThreadsOption = 0, pool_mib: PoolOption = 0, seed: SeedOption = 1,
    as_json: JsonOption = False,
) -> int:
    """Save and restore through each tier, beside memcpy, host copy, plain write and read."""
    from flashrt_ros.cli.benchmarks import store as measure
    positions = _numbers(position, '--position', 1)
    with _folder(directory) as place:
        context = _context(max(positions))
        host = _pool(pool_mib, model, dtype, device, context, 2 * context, blocks=8)
        engine = open_engine(
            model, dtype=dtype, device=device, threads=threads, directory=place, context=context,
            pool_bytes=_pool(pool_mib, model, dtype, device, context, 4 * context),
            host_bytes=host)
        peak = _peak(engine)
        rows = _rows(measure.row(engine, Path(place), where, repeats, seed)
                     for where in positions)
        return _report(engine, 'tiers, milliseconds (medians) and ratios to the raw medium', rows,
                       as_json, seed, '', {
                           'position': 'position', 'bytes': 'bytes',
                           'restore_device_ms': 'restore', 'restore_device_over_raw': '/ memcpy',
                           'restore_host_ms': 'from host', 'restore_host_over_raw': '/ copy',
                           'down_disk_ms': 'to disk', 'down_disk_over_raw': '/ write',
                           'restore_disk_ms': 'from disk', 'restore_disk_over_raw': '/ read',
                           'restore_disk_cold_ms': 'cold', 'restore_disk_cold_over_raw': '/ read'},
                       peak)


@app.command('decode')
def decode(
    position: Annotated[str, typer.Option(
        help='Positions to decode from.')] = '256,2048',
    tokens: Annotated[int, typer.Option(
        min=0, help='Tokens in a block; 0 for 256 on a CUDA device and 48 on a CPU.')] = 0,
    repeats: Annotated[int, typer.Option(min=1, help='Blocks of each side.')] = 5,
    oracle: OracleOption = True,
    compiled: Annotated[bool, typer.Option(
        '--compiled/--no-compiled', help='On a CUDA device: transformers with a static cache and '
        'a compiled step too; compiling takes about a minute.')] = True,
    model: ModelOption = 'embedded', dtype: DtypeOption = 'auto',
    device: DeviceOption = 'auto', threads: ThreadsOption = 0, pool_mib: PoolOption = 0,
    seed: SeedOption = 1, as_json: JsonOption = False,
) -> int:
    """Tokens a second, ours and transformers with its cache, in alternating blocks."""
    from flashrt_ros.cli.benchmarks import decode as measure
    positions = _numbers(position, '--position', 1)
    context = _context(max(positions) + max(tokens, 256))
    engine = open_engine(
        model, dtype=dtype, device=device, threads=threads, context=context,
        pool_bytes=_pool(pool_mib, model, dtype, device, context, 2 * context))
    reference, sentence = _oracle(engine, oracle)
    peak, fast = _peak(engine), None
    if peak and compiled and reference is not None:
        from flashrt_ros.cli.benchmarks.oracle import Compiled
        fast = Compiled(reference.model, context)
    gc.collect()
    gc.freeze()  # as the node does: a collection is no part of a token
    count = tokens or (256 if peak else 48)
    rows = _rows(measure.row(engine, reference, fast, place, count, repeats, seed, peak)
                 for place in positions)
    return _report(engine, 'decoding (medians a token)', rows, as_json, seed, sentence, {
        'position': 'position', 'tokens_per_second': 'tokens/s', 'token_ms': 'ms a token',
        'token_p99_ms': 'p99', 'transformers_tokens_per_second': 'transformers tokens/s',
        'transformers_token_p99_ms': 'its p99', 'ratio': 'ours / theirs',
        **({'share_of_bandwidth': 'of bandwidth', 'transformers_compiled_tokens_per_second':
            'compiled tokens/s'} if peak else {})}, peak)


@app.command('oracle')
def oracle(
    length: Annotated[str, typer.Option(help='Lengths of prompts in tokens.')] = '700',
    steps: Annotated[int, typer.Option(min=0, help='Tokens folded one by one behind.')] = 4,
    model: ModelOption = 'embedded', dtype: DtypeOption = 'auto', device: DeviceOption = 'auto',
    threads: ThreadsOption = 0, pool_mib: PoolOption = 0, seed: SeedOption = 1,
    as_json: JsonOption = False,
) -> int:
    """Compare logits with transformers on the same weights; exit code 1 if they are too far."""
    from flashrt_ros.cli.benchmarks import agreement
    lengths = _numbers(length, '--length', 1)
    context = _context(max(lengths) + steps)
    engine = open_engine(
        model, dtype=dtype, device=device, threads=threads, context=context,
        pool_bytes=_pool(pool_mib, model, dtype, device, context, context, blocks=8))
    rows, sentence = agreement.rows(engine, lengths, steps, seed)
    _report(engine, 'logits, distances relative to the largest', rows, as_json, seed, sentence, {
        'length': 'prompt', 'step': 'step', 'ours_to_fp32': 'ours to fp32',
        'transformers_to_fp32': 'transformers to fp32', 'ours_to_transformers': 'ours to theirs'})
    return exits.OK if rows and all(row['passed'] for row in rows) else exits.FAILED


@app.command('ros')
def ros(
    quick: Annotated[bool, typer.Option('--quick', help='Fewer repeats.')] = False,
    model: ModelOption = 'embedded', device: DeviceOption = 'auto', threads: ThreadsOption = 0,
    seed: SeedOption = 1, as_json: JsonOption = False,
    parameter: Annotated[list[str] | None, typer.Option(
        '--parameter', '-p', metavar='NAME:=VALUE', help='Parameter of the node, such as '
        'thread_priority:=10; may be given again.')] = None,
) -> int:
    """What ROS costs: round trips, the way of a token, publishing; a bare peer beside each."""
    from flashrt_ros.cli.benchmarks import ros_report
    for given in parameter or ():
        if not all(given.partition(':=')):
            raise typer.BadParameter(f'give NAME:=VALUE, not {given!r}.',
                                     param_hint='--parameter')
    return ros_report.report(model, device, threads, seed, quick, as_json, parameter or ())


def _folder(directory: str) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(dir=directory or None)
    except (OSError, ValueError) as error:
        raise Storage(f'{directory!r} cannot hold the files of the disk tier ({error}); name '
                      'another --directory.') from error


def _oracle(engine: Any, wanted: bool) -> tuple[Any, str]:
    if not wanted:
        return None, 'not compared: --no-transformers'
    from flashrt_ros.cli.benchmarks import oracle
    return oracle.load(engine)


def _rows(measured: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collect rows; each is told as it comes, so that a run that is cut short leaves some."""
    rows = []
    for row in measured:
        rows.append(row)
        output.log(f'measured: {json.dumps(row)}')
    return rows


def _report(engine: Any, title: str, rows: list[dict[str, Any]], as_json: bool, seed: int,
            sentence: str, columns: dict[str, str], peak: dict[str, Any] | None = None) -> int:
    from flashrt_ros.cli.benchmarks.timing import conditions
    facts = conditions(engine, seed)
    engine.close()
    if as_json:
        output.emit({'rows': rows, **({'transformers': sentence} if sentence else {}), **facts,
                     **({'ceiling': peak} if peak else {})})
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
    if isinstance(value, int):
        return f'{value:,}'
    return f'{value:.1e}' if 0 < abs(value) < 1e-3 else f'{value:,.3f}'
