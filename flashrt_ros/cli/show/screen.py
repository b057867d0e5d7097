"""What the demo shows: plain lines that read well in a terminal, in a log and in a CI job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashrt_ros.cli import output

INDENT = '    '


class Screen:
    """
    Prints as things happen; nothing is redrawn, so a pipe gets the same as a terminal.

    :param console: None shows nothing, for ``--json``.
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self._column = 0

    def title(self, text: str, words: str = '') -> None:
        """Begin the demo."""
        self._print(f'\n[bold]{escape(text)}[/]')
        if words:
            self.note(words)

    def act(self, number: int, text: str) -> None:
        """Begin an act."""
        self._print(f'\n[bold cyan]{number}[/]  [bold]{escape(text)}[/]')

    def note(self, text: str) -> None:
        """Say something in a quiet voice."""
        self._print(f'{INDENT}[dim]{escape(text)}[/]')

    def user(self, text: str, session: str = '') -> None:
        """Show what a person says to the robot."""
        mark = f'[magenta]{escape(session)}[/] ' if session else ''
        self._print(f'{INDENT}{mark}[bold]“{escape(text)}”[/]')
        self._column = 0

    def stream(self, text: str) -> None:
        """Show a piece of an answer the moment it arrives."""
        if self.console is None:
            return
        for index, line in enumerate(text.split('\n')):
            if index and self._column:  # no blank lines
                self.console.print()
                self._column = 0
            if line:
                self.console.print(Text(('' if self._column else INDENT + '  ') + line, 'green'),
                                   end='', soft_wrap=True)
                self._column += len(line)
        self.console.file.flush()

    def end(self, words: str = '') -> None:
        """End an answer, with what it cost."""
        if self._column and self.console is not None:
            self.console.print()
        self._column = 0
        if words:
            self.note(words)

    def claim(self, passed: bool, text: str) -> None:
        """Show a claim that was just tested."""
        mark = '[green]✓[/]' if passed else '[bold red]✗ FAILED:[/]'
        self._print(f'{INDENT}{mark} {escape(text)}')

    def costs(self, rows: list[tuple[str, str, str]]) -> None:
        """Show the table of what it cost."""
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style='bold')
        table.add_column(justify='right', style='cyan')
        table.add_column(style='dim', overflow='fold')
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        if self.console is not None:
            self.console.print()
            self.console.print(table)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show that something takes a moment; a spinner where there is a terminal."""
        if self.console is None or not self.console.is_terminal:
            self.note(text)
            yield
            return
        with self.console.status(f'[dim]{escape(text)}[/]', spinner='dots'):
            yield

    def _print(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text)


def open_screen(quiet: bool) -> Screen:
    """Return the screen for people, or the one that shows nothing."""
    return Screen(None if quiet else output.people())
