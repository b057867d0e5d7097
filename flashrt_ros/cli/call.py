"""
`flashrt-ros call`: the verbs, against a node that runs.

Each refusal has its own exit code (see :mod:`flashrt_ros.cli.exits`): 3 where the node is not found
or not active, 5 where it did not answer in time.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.completion import completion_init

from flashrt_ros.cli import exits, output
from flashrt_ros.cli.live import (
    complete_capsule,
    complete_session,
    connected,
    DiscoveryOption,
    NamespaceOption,
    plain,
    TimeoutOption,
)
from flashrt_ros.cli.opening import JsonOption
from flashrt_ros.cli.output import duration, megabytes
from flashrt_ros.errors import DeadlineExceeded

app = typer.Typer(no_args_is_help=True, help='Call a node that runs.')
# Without options of its own for it, typer leaves the shells out: docs/operations.md, completion.
completion_init()

CapsuleArgument = Annotated[str, typer.Argument(
    help='Name or id of a capsule.', autocompletion=complete_capsule)]
SessionOption = Annotated[str, typer.Option(
    '--session', '-s', help="Session; '' is the default one.", autocompletion=complete_session)]
CapsuleOption = Annotated[str, typer.Option(
    '--capsule', '-c', help='Capsule to start from.', autocompletion=complete_capsule)]
SeedOption = Annotated[int | None, typer.Option(
    '--seed', min=0, help='Start another random sequence.')]
EpochOption = Annotated[int, typer.Option(
    '--expected-epoch', min=0, max=(1 << 64) - 1,
    help='Refuse where the session is in another epoch; 0: any.')]
ON_BUSY = typer.Option('--on-busy', help='default, reject, wait or preempt.')
TIERS = {1: 'device', 2: 'host', 4: 'disk'}


def _say(response: Any, as_json: bool, words: str) -> int:
    if as_json:
        output.emit(plain(response))
    else:
        output.people().print(words, soft_wrap=True)
    return exits.OK


def _on_busy(value: str) -> str:
    if value not in ('default', 'reject', 'wait', 'preempt'):
        raise typer.BadParameter('give default, reject, wait or preempt.', param_hint='--on-busy')
    return value


@app.command('save')
def save(
    capsule: Annotated[str, typer.Argument(help='Name to give.', autocompletion=complete_capsule)],
    session: SessionOption = '',
    overwrite: Annotated[bool, typer.Option('--overwrite', help='Replace it.')] = False,
    pin: Annotated[bool, typer.Option('--pin', help='Never evict it.')] = False,
    persist: Annotated[bool, typer.Option('--persist', help='Write it to disk too.')] = False,
    align: Annotated[bool, typer.Option('--align', help='Freeze a grid boundary.')] = False,
    note: Annotated[str, typer.Option('--note', help='Free text, kept with it.')] = '',
    namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """Freeze a session under a name."""
    with connected(namespace, discovery, timeout) as client:
        done = client.save(capsule, session, overwrite=overwrite, pin=pin, persist=persist,
                           align=align, note=note)
    return _say(done, as_json, f'saved {done.info.name}: {done.info.tokens} tokens, '
                f'{megabytes(done.info.bytes)}, {megabytes(done.bytes_copied)} copied, in '
                f'{duration(plain(done.elapsed))}')


@app.command('restore')
def restore(
    capsule: CapsuleArgument, session: SessionOption = '', seed: SeedOption = None,
    on_busy: Annotated[str, ON_BUSY] = 'default', expected_epoch: EpochOption = 0,
    namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """Make a capsule the state of a session."""
    _on_busy(on_busy)
    with connected(namespace, discovery, timeout) as client:
        done = client.restore(capsule, session, seed=seed, on_busy=on_busy,
                              expected_epoch=expected_epoch)
    return _say(done, as_json, f'restored {done.info.name}: {done.tokens_reused} tokens reused, '
                f'{megabytes(done.bytes_copied)} copied, in {duration(plain(done.elapsed))}')


@app.command('fork')
def fork(
    sessions: Annotated[list[str], typer.Argument(help='Names of the branches.')],
    capsule: CapsuleOption = '',
    source: Annotated[str, typer.Option(
        '--from-session', help='Fork its live state, where no capsule is named.',
        autocompletion=complete_session)] = '',
    seed: Annotated[list[int] | None, typer.Option(
        '--seed', min=0, help='One for each branch.')] = None,
    namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """Start sessions from a capsule, or from the live state of a session."""
    with connected(namespace, discovery, timeout) as client:
        done = client.fork(sessions, capsule, source_session=source, seeds=seed or ())
    return _say(done, as_json, f'forked {done.info.name} into {", ".join(done.sessions)}: '
                f'{megabytes(done.bytes_copied)} copied, in {duration(plain(done.elapsed))}')


@app.command('rollback')
def rollback(
    position: Annotated[int | None, typer.Option(min=0, help='An absolute position.')] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help='That many tokens back.')] = None,
    turns: Annotated[int | None, typer.Option(min=0, help='That many turns back.')] = None,
    session: SessionOption = '',
    expected_epoch: EpochOption = 0,
    max_replay: Annotated[int | None, typer.Option(
        min=0, help='Refuse where more tokens had to be replayed.')] = None,
    namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """Take a session back: give one of --position, --tokens and --turns."""
    if sum(value is not None for value in (position, tokens, turns)) != 1:
        raise typer.BadParameter('give exactly one of --position, --tokens and --turns.')
    fields = {} if max_replay is None else {'max_replay': max_replay}
    with connected(namespace, discovery, timeout) as client:
        done = client.rollback(position=position, tokens=tokens, turns=turns, session=session,
                               expected_epoch=expected_epoch, **fields)
    return _say(done, as_json, f'rolled back to position {done.position}: '
                f'{done.tokens_replayed} tokens replayed, in {duration(plain(done.elapsed))}')


@app.command('list')
def list_capsules(
    session: SessionOption = '', namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """List the capsules of the node."""
    with connected(namespace, discovery, timeout) as client:
        capsules = client.list(session)
    if as_json:
        output.emit({'capsules': plain(capsules)})
        return exits.OK
    from rich.table import Table
    table = Table(box=None, pad_edge=False, header_style='bold')
    for heading in ('name', 'tokens', 'size', 'own', 'where', 'session', 'note'):
        table.add_column(heading, justify='right' if heading in ('tokens', 'size', 'own') else
                         'left')
    for info in capsules:
        table.add_row(info.name + (' (pinned)' if info.pinned else ''), str(info.tokens),
                      megabytes(info.bytes), megabytes(info.bytes_exclusive),
                      tiers(info.tiers), info.session, info.note)
    output.people().print(table if capsules else 'no capsules')
    return exits.OK


def tiers(mask: int) -> str:
    """Return where a capsule's bytes are, in words."""
    return '+'.join(word for bit, word in TIERS.items() if mask & bit)


@app.command('drop')
def drop(
    capsule: CapsuleArgument, namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """Drop a capsule and its file."""
    with connected(namespace, discovery, timeout) as client:
        done = client.drop(capsule)
    return _say(done, as_json, f'dropped {capsule}: {megabytes(done.bytes_freed)} freed')


@app.command('pin')
def pin(
    capsule: CapsuleArgument,
    release: Annotated[bool, typer.Option('--release', help='Allow to evict it again.')] = False,
    namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """Pin a capsule, so that no budget evicts it, or release it."""
    with connected(namespace, discovery, timeout) as client:
        done = client.pin(capsule, not release)
    return _say(done, as_json, f'{"released" if release else "pinned"} {done.info.name}')


@app.command('close')
def close(
    session: Annotated[str, typer.Argument(
        help='Session to close.', autocompletion=complete_session)],
    namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """Close a session; its capsules stay."""
    with connected(namespace, discovery, timeout) as client:
        done = client.close_session(session)
    return _say(done, as_json, f'closed {session}: {megabytes(done.bytes_freed)} freed')


@app.command('reset')
def reset(
    namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """Empty the default session."""
    return _trigger('reset', 'the default session is empty', namespace, discovery, timeout, as_json)


@app.command('cancel')
def cancel(
    namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: TimeoutOption = 10.0, as_json: JsonOption = False,
) -> int:
    """Tell all goals of the node to end."""
    return _trigger('cancel_all', 'all goals were told to end', namespace, discovery, timeout,
                    as_json)


def _trigger(service: str, words: str, namespace: str, discovery: float, timeout: float,
             as_json: bool) -> int:
    from std_srvs.srv import Trigger
    with connected(namespace, discovery, timeout) as client:
        done = client.call(service, Trigger.Request())
    return _say(done, as_json, words)


@app.command('generate')
def generate(
    prompt: Annotated[str, typer.Argument(
        help="A user turn; '-' reads stdin, none continues where the session stands.")] = '',
    session: SessionOption = '', capsule: CapsuleOption = '',
    save_as: Annotated[str, typer.Option('--save-as', help='Save the end under a name.')] = '',
    max_tokens: Annotated[int, typer.Option(min=-1, help='-1: as the node says.')] = -1,
    temperature: Annotated[float, typer.Option(help='0 is greedy; -1: as the node says.')] = -1.0,
    top_p: Annotated[float, typer.Option(help='-1: as the node says.')] = -1.0,
    top_k: Annotated[int, typer.Option(help='-1: as the node says.')] = -1,
    seed: SeedOption = None,
    stop: Annotated[list[str] | None, typer.Option('--stop', help='Text that ends it.')] = None,
    raw: Annotated[bool, typer.Option('--raw', help='Without the chat template.')] = False,
    on_busy: Annotated[str, ON_BUSY] = 'default',
    rollback_on_cancel: Annotated[bool, typer.Option(
        '--rollback-on-cancel', help='A cancel leaves the session where it stood before.')] = False,
    namespace: NamespaceOption = '', discovery: DiscoveryOption = 5.0,
    timeout: Annotated[float, typer.Option(
        '--timeout', min=0.0, help='Seconds that the node gives the goal; 0: no limit.')] = 0.0,
    as_json: JsonOption = False,
) -> int:
    """Let the model go on, and print its text as it comes; Ctrl-C cancels the goal."""
    _on_busy(on_busy)
    words = sys.stdin.read() if prompt == '-' else prompt
    with connected(namespace, discovery, 10.0) as client:
        stream = client.generate(
            words, session=session, capsule=capsule, save_as=save_as, max_tokens=max_tokens,
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or [],
            raw=raw, on_busy=on_busy, on_cancel=int(rollback_on_cancel), timeout=timeout)
        try:
            for token in stream:
                if not as_json:
                    print(token.text, end='', flush=True)
            # The node ends what takes too long; a node that hangs does not.
            result = stream.result(timeout + 10.0 if timeout else None)
        except BaseException as error:
            if not exits.interrupted(error):
                raise
            stream.cancel()
            try:
                stream.result(5.0, check=False)
            except DeadlineExceeded:
                output.log('The node did not confirm the cancel within 5 s.')
            raise KeyboardInterrupt from error
        finally:
            if not as_json:
                print(flush=True)
    if as_json:
        output.emit(plain(result))
    else:
        output.log(f'{result.completion_tokens} tokens, {result.tokens_per_second:.1f} tokens/s, '
                   f'first after {duration(plain(result.time_to_first_token))}; '
                   f'{result.tokens_reused} reused, {result.tokens_prefilled} prefilled, position '
                   f'{result.position}')
    return exits.OK
