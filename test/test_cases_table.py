"""
The table in docs/cases.md cannot rot: cases, tests and marks are held against the sources.

``python -m pytest $(python test/test_cases_table.py)`` runs what it names and nothing else.
"""

import ast
from pathlib import Path
import re

HERE = Path(__file__).parent
CASES = [*(str(n) for n in range(1, 29)), '28b', *(str(n) for n in range(29, 33))]
ROW = re.compile(r'\| (\d+b?) \| [^|]+ \| (.+) \|')
TEST = re.compile(r'`(test_\w+\.py)::(test_\w+)`( \*\(device\)\*)?')


def table() -> dict[str, list[tuple[str, str, bool]]]:
    text = (HERE.parent / 'docs' / 'cases.md').read_text(encoding='utf-8')
    return {case: [(file, test, bool(mark)) for file, test, mark in TEST.findall(cell)]
            for case, cell in ROW.findall(text)}


def named_in(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((HERE / file).read_text(encoding='utf-8'))
    return {node.name: node for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith('test_')}


def test_every_case_has_a_line_with_tests():
    assert list(table()) == CASES
    assert all(table().values())


def test_every_test_in_the_table_exists_and_is_marked_as_it_is():
    for case, named in table().items():
        for file, name, device in named:
            function = named_in(file).get(name)
            assert function is not None, f'case {case}: {file}::{name} does not exist'
            marks = {m.id for m in function.decorator_list if isinstance(m, ast.Name)}
            assert device == ('cuda' in marks), f'case {case}: {name}'


def test_every_test_with_a_number_stands_in_its_line():
    named = {(file, test): case for case, entries in table().items() for file, test, _ in entries}
    for path in HERE.glob('test_*.py'):
        for name in named_in(path.name):
            found = re.match(r'test_case_0?(\d+b?)_', name)
            if found and found[1] in CASES:
                assert named.get((path.name, name)) == found[1], (
                    f'{path.name}::{name} is not in the line of case {found[1]}')


if __name__ == '__main__':
    print(*dict.fromkeys(f'{HERE.name}/{file}::{test}' for named in table().values()
                         for file, test, _ in named))
