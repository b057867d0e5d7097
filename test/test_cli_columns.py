"""How wide the command line prints where there is no terminal: as COLUMNS says, else 100."""

import pytest
from rich.table import Table

from flashrt_ros.cli import output, verify
from flashrt_ros.cli.checks import Check


def table():
    """Return a table that takes all the width it gets."""
    made = Table()
    for _ in range(4):
        made.add_column('a heading')
    made.add_row(*['some words that can be wrapped anywhere ' * 3] * 4)
    return made


@pytest.mark.parametrize(('columns', 'width'), [
    ('60', 60), ('140', 140), (None, 100), ('', 100), ('0', 100), ('wide', 100), ('-5', 100)])
def test_tables_take_the_width_that_columns_says(monkeypatch, capsys, columns, width):
    if columns is None:
        monkeypatch.delenv('COLUMNS', raising=False)
    else:
        monkeypatch.setenv('COLUMNS', columns)
    output.people().print(table())
    assert max(map(len, capsys.readouterr().out.splitlines())) == width


@pytest.mark.parametrize('columns', [60, 80, 100])
def test_lines_of_verify_fit(monkeypatch, capsys, columns):
    monkeypatch.setenv('COLUMNS', str(columns))
    shown = verify._Table({'model': 'random:tiny'})
    shown.add(Check('failed_restore_untouched', True, 0, 'bytes', 'Some words. ' * 20))
    shown.end(True, 1, 0)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.endswith('0.0 s') and '0 bytes' in line for line in lines)
