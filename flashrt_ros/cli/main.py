"""Entry point of `flashrt-ros`: collects the commands, turns every end into an honest exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from flashrt_ros import __version__
from flashrt_ros.cli import bench, call, capsules, demo, doctor, exits, output, top, verify
from flashrt_ros.errors import FlashrtError

# OpenMP threads that spin while they wait starve everything else on a small machine: a prefill of
# the embedded model beside a busy core took 14 times as long. Read when torch is imported, later.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

app = typer.Typer(
    name='flashrt-ros', no_args_is_help=True, add_completion=False, rich_markup_mode='rich',
    help='A language model whose whole state can be saved, restored, forked and rolled back.')
app.command('demo')(demo.demo)
app.command('verify')(verify.verify)
app.add_typer(bench.app, name='bench')
app.add_typer(capsules.app, name='capsule')
app.add_typer(call.app, name='call')
app.command('top')(top.top)
app.command('doctor')(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _root(version: Annotated[bool, typer.Option(
        '--version', callback=_version, is_eager=True, help='Print the version.')] = False) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """
    Run one command line and return its exit code (see :mod:`flashrt_ros.cli.exits`).

    A refusal prints its sentence on stderr, never a traceback; with ``--json`` the document then
    is ``{"error": {"code", "message"}}``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = output.wants_json(arguments)
    output.start_logging()
    output.tolerate_odd_names()
    with output.stdout_for_json(as_json):
        try:
            command = typer.main.get_command(app)
            status = int(command.main(arguments, prog_name='flashrt-ros',
                                      standalone_mode=False) or exits.OK)
            if status == exits.INTERRUPTED:  # some versions of typer make an exit of it
                raise KeyboardInterrupt
            return status
        except FlashrtError as error:
            return _refuse(as_json, exits.for_code(error.code), error.code, str(error))
        except output.MissingError as error:
            return _refuse(as_json, exits.MISSING, 'MISSING', str(error))
        except (KeyboardInterrupt, typer.Abort):
            return _refuse(as_json, exits.INTERRUPTED, 'INTERRUPTED', 'Interrupted.')
        except BrokenPipeError:
            sys.stderr.close()  # the reader went away: nothing to say and nobody to say it to
            return exits.OK
        except Exception as error:
            # Usage errors come from click or from typer's own copy of it, depending on typer's
            # version; both carry an exit code and can show themselves.
            if hasattr(error, 'exit_code') and hasattr(error, 'show'):
                error.show()
                if as_json:
                    output.emit({'error': {'code': 'USAGE', 'message': _usage(error)}})
                return int(error.exit_code)
            if exits.interrupted(error):
                return _refuse(as_json, exits.INTERRUPTED, 'INTERRUPTED', 'Interrupted.')
            traceback.print_exc()
            return _refuse(as_json, exits.BUG, 'INTERNAL', f'{type(error).__name__}: {error}')


def _usage(error: Exception) -> str:
    """Return what is wrong with a command line, and with which option."""
    whole = getattr(error, 'format_message', None)
    return whole() if whole is not None else str(error)


def _refuse(as_json: bool, status: int, code: str, message: str) -> int:
    print(f'flashrt-ros: {message}', file=sys.stderr)
    if as_json and not output.emitted():
        output.emit({'error': {'code': code, 'message': message}})
    return status


if __name__ == '__main__':
    sys.exit(main())
