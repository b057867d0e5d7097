"""What `bench ros` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashrt_ros.cli import exits, output


def report(model: str, device: str, threads: int, seed: int, quick: bool, as_json: bool,
           parameters: Sequence[str] = ()) -> int:
    """
    Measure and print.

    :param parameters: of the node, as `name:=value`.

    :raises MissingError: where there is no ROS 2.
    """
    try:
        import flashrt_ros.client  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise output.MissingError(
            f'bench ros needs ROS 2 and the interfaces of this package ({error}); '
            '`flashrt-ros doctor` tells more.') from error
    from flashrt_ros.cli.benchmarks import ros
    found = ros.measure(model, device, threads, seed, quick, parameters)
    if as_json:
        output.emit(found)
    else:
        _show(found)
    return exits.OK


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table
    console = output.people()
    table = Table(title='service round trips, milliseconds: median (p99)', box=None,
                  pad_edge=False, header_style='bold')
    names = {'list': 'list', 'save': 'save', 'restore': 'restore', 'trigger': 'bare Trigger'}
    table.add_column('node is', no_wrap=True)
    for heading in names.values():
        table.add_column(heading, justify='right')
    when = {'idle': 'idle', 'streaming': 'streaming',
            'eight': f'streaming, {found["clients"]} clients'}
    for row in found['rows']:
        table.add_row(when[row['when']], *(_pair(row, key) for key in names))
    console.print(table)
    console.print('  of a restore, inside the node: ' + ', '.join(
        f'{when[row["when"]]} {_pair(row, "restore_inside")}' for row in found['rows']
        if 'restore_inside_ms' in row) +
        f'\n  a call keeps the node computing for {found["node_ms_a_call"]:.3f} ms')
    tokens = found['tokens']
    console.print(
        f'\n[bold]a token, from worker to subscriber, milliseconds: median (p99)[/]\n'
        f'  nothing else       {_pair(tokens, "token_latency_only")}, '
        f'as feedback {_pair(tokens, "feedback_latency_only")}\n'
        f'  beside calls       {_pair(tokens, "token_latency")}, '
        f'as feedback {_pair(tokens, "feedback_latency")}, '
        f'bare String {_pair(tokens, "string_latency")}\n'
        f'  with {found["clients"]} clients     {_pair(tokens, "token_latency_eight")}, '
        f'as feedback {_pair(tokens, "feedback_latency_eight")}, '
        f'bare String {_pair(tokens, "string_latency_eight")}')
    decode = found['decode']
    console.print(
        f'\n[bold]decoding, tokens a second[/]\n'
        f'  bare engine        {decode["bare_tokens_per_second"]:,.1f}\n'
        f'  node, nobody hears {decode["alone_tokens_per_second"]:,.1f}\n'
        f'  node and client    {decode["heard_tokens_per_second"]:,.1f}; with a message for each '
        f'token {decode["each_tokens_per_second"]:,.1f}\n'
        f'  between tokens, ms {_pair(decode, "token_alone")}; with {found["clients"]} clients '
        f'{_pair(decode, "token_eight")}'
        + (f', on the clock of the device {_pair(decode, "step_eight")}'
           if 'step_eight_ms' in decode else ''))
    for name, words in (('heard', 'node and client'), ('eight', f'{found["clients"]} clients')):
        if spent := found['worker'].get(name):
            console.print(
                f'  of a token, {words}: computes {spent["computes_ms"]:.3f} ms, waits '
                f'{spent["waits_for_core_ms"]:.3f} for a core, '
                f'{spent["waits_for_interpreter_ms"]:.3f} for the interpreter')
    table = Table(title='\ntargets', box=None, pad_edge=False, header_style='bold')
    for heading in ('what', 'found', 'at most', ''):
        table.add_column(heading, justify='left' if heading == 'what' else 'right')
    for name, target in found['targets'].items():
        table.add_row(name, f'{target["found"]:.4f}', f'{target["at_most"]:g}',
                      '[green]met[/]' if target['met'] else '[red]missed[/]')
    console.print(table)
    console.print(f'[dim]{found["model"].get("model", "")}, {found["device"]}, {found["cpu"]}, '
                  f'{found["cores"]} cores under a load of {found["load_average"][0]}[/]')


def _pair(row: dict[str, Any], key: str) -> str:
    return f'{row[f"{key}_ms"]:.3f} ({row[f"{key}_p99_ms"]:.3f})'
