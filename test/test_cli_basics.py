"""The command line as its users meet it: real processes, exit codes, one JSON document."""

import contextlib
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

from flashrt_ros.cli import exits, output
from flashrt_ros.errors import BY_CODE

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments, timeout=120, **environment):
    """Run the command line in a new process."""
    return subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.cli.main', *arguments], capture_output=True, text=True,
        timeout=timeout, env={**os.environ, 'OMP_NUM_THREADS': '1', **environment},
        check=False)


def document(process):
    """Return the one JSON document that a process printed."""
    return json.loads(process.stdout)


def test_help_names_every_command_and_imports_nothing_heavy():
    process = run('--help')
    assert process.returncode == 0
    for command in ('demo', 'verify', 'bench', 'capsule', 'doctor'):
        assert command in process.stdout
    code = ('import sys; from flashrt_ros.cli.main import main; main(["--help"]); '
            'print([m for m in ("torch", "rclpy", "transformers", "numpy") if m in sys.modules])')
    imported = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True,
                              timeout=60, check=True)
    assert imported.stdout.splitlines()[-1] == '[]'


def test_version_is_that_of_the_package():
    from flashrt_ros import __version__
    assert run('--version').stdout.strip() == __version__


@pytest.mark.parametrize('arguments', [
    ('nonsense',), ('verify', '--nonsense'), ('verify', '--only', 'nonsense'),
    ('bench', 'ttft', '--prefix', 'many'), ('bench', 'capsule', '--position', '0'),
    ('verify', '--context', '3'), ('capsule', 'show')])
def test_a_command_line_that_makes_no_sense_exits_2(arguments):
    process = run(*arguments, '--json')
    assert process.returncode == exits.USAGE and 'Traceback' not in process.stderr
    assert document(process)['error']['code'] == 'USAGE'


def test_usage_goes_to_stderr():
    process = run('verify', '--nonsense')
    assert process.returncode == exits.USAGE and process.stdout == ''
    assert '--nonsense' in process.stderr


@pytest.mark.parametrize(('arguments', 'code'), [
    (('verify', '--model', '/nonexistent/model', '--quick'), 'STORAGE'),
    (('verify', '--model', 'random:nonsense'), 'INVALID_ARGUMENT'),
    (('verify', '--model', 'random:tiny', '--dtype', 'int3'), 'INVALID_ARGUMENT'),
    (('bench', 'capsule', '--model', 'random:tiny', '--position', '99999999'),
     'INVALID_ARGUMENT'),
    (('bench', 'ttft', '--model', ''), 'INVALID_ARGUMENT'),
    (('capsule', 'ls', '--directory', '/nonexistent/place'), 'STORAGE'),
    (('demo', '--scene', 'nonsense'), 'INVALID_ARGUMENT')])
def test_a_refusal_prints_its_sentence_and_exits_by_its_class(arguments, code):
    process = run(*arguments, '--json')
    assert process.returncode == exits.for_code(code), process.stderr
    assert 'Traceback' not in process.stderr
    error = document(process)['error']
    assert error['code'] == code and len(error['message']) > 20
    assert process.stderr.splitlines()[-1] == f'flashrt-ros: {error["message"]}'


def test_a_refusal_without_json_leaves_stdout_empty():
    process = run('capsule', 'ls', '--directory', '/nonexistent/place')
    assert process.returncode == exits.for_code('STORAGE') and process.stdout == ''
    assert process.stderr.startswith('flashrt-ros: ') and len(process.stderr.splitlines()) == 1


def test_every_error_code_has_an_exit_code_of_its_own():
    assert set(exits.REFUSALS) == set(BY_CODE)
    numbers = list(exits.REFUSALS.values())
    assert len(set(numbers)) == len(numbers) and min(numbers) == 3
    assert not set(numbers) & {exits.OK, exits.FAILED, exits.USAGE, exits.MISSING, exits.BUG}


def test_exit_codes_follow_the_order_of_the_message():
    text = (ROOT / 'msg' / 'ErrorCode.msg').read_text()
    constants = [line.split()[1].split('=') for line in text.splitlines()
                 if line.startswith('uint16')]
    values = {name: int(value) for name, value in constants}
    for code, number in exits.REFUSALS.items():
        assert number - 3 == values[code] - 42001


def test_json_keeps_stdout_clean_whatever_writes_there():
    code = ('import os, sys\n'
            'from flashrt_ros.cli import output\n'
            'with output.stdout_for_json(True):\n'
            '    print("python noise"); os.write(1, b"native noise\\n"); os.system("echo child")\n'
            '    output.emit({"answer": 42})\n'
            'print("afterwards")\n')
    process = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True,
                             timeout=60, check=True)
    text, _, rest = process.stdout.partition('}\n')
    assert json.loads(text + '}') == {'answer': 42} and rest == 'afterwards\n'
    for noise in ('python noise', 'native noise', 'child'):
        assert noise in process.stderr


def test_two_documents_are_a_bug(capsys):
    output._documents = 0
    output.emit({})
    with pytest.raises(RuntimeError):
        output.emit({})
    output._documents = 0


def test_a_reader_that_goes_away_is_no_traceback():
    process = subprocess.Popen(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'doctor', '--model', 'random:tiny'],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    with process.stderr:
        assert b'Traceback' not in process.stderr.read()
    process.wait(timeout=60)


def test_doctor_says_what_is_there_and_what_to_do(tmp_path):
    process = run('doctor', '--model', 'random:tiny', '--json', FLASHRT_CAPSULES=str(tmp_path))
    report = document(process)
    found = {finding['name']: finding for finding in report['findings']}
    assert {'system', 'cpu', 'memory', 'torch', 'cuda', 'ros', 'model',
            'capsules'} <= found.keys()
    assert all(finding['status'] in ('ok', 'warn', 'missing') for finding in found.values())
    assert all(finding['remedy'] for finding in found.values() if finding['status'] == 'missing')
    missing = any(finding['status'] == 'missing' for finding in found.values())
    assert report['passed'] is not missing
    assert process.returncode == (exits.FAILED if missing else exits.OK)
    assert str(tmp_path) in found['capsules']['found']


def test_doctor_fails_where_the_model_is_not_there():
    process = run('doctor', '--model', '/nonexistent/model', '--json')
    found = {finding['name']: finding for finding in document(process)['findings']}
    assert found['model']['status'] == 'missing' and process.returncode == exits.FAILED


def test_an_interrupt_ends_it_quietly():
    process = subprocess.Popen(
        [sys.executable, '-m', 'flashrt_ros.cli.main', 'verify', '--model', 'random:tiny',
         '--only', 'steady_memory', '--seconds', '60', '--json'],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:  # loaded: the check is about to run
        if 'fingerprint' in line:
            break
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == exits.INTERRUPTED and 'Traceback' not in err
    assert json.loads(out)['error']['code'] == 'INTERRUPTED'


def _as_compiled_code_does(*_, **__):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as cause:
        raise TypeError('Unable to convert function return value to a Python type!') from cause


def test_an_interrupt_within_compiled_code_is_an_interrupt(monkeypatch, capfd):
    from flashrt_ros.cli import main
    monkeypatch.setattr('typer.main.get_command', lambda app: type(
        'Command', (), {'main': staticmethod(_as_compiled_code_does)}))
    assert main.main(['doctor', '--json']) == exits.INTERRUPTED
    out, err = capfd.readouterr()
    assert json.loads(out)['error']['code'] == 'INTERRUPTED' and 'Traceback' not in err


def test_an_interrupted_answer_is_canceled_wherever_the_signal_arrives(monkeypatch):
    from flashrt_ros.cli import call
    told = []

    class Stream:
        __iter__ = _as_compiled_code_does

        def cancel(self):
            told.append('cancel')

        def result(self, timeout=None, check=True):
            told.append('result')

    class Client:
        def generate(self, *_, **__):
            return Stream()

    monkeypatch.setattr(call, 'connected', lambda *_: contextlib.nullcontext(Client()))
    with pytest.raises(KeyboardInterrupt):
        call.generate('go on')
    assert told == ['cancel', 'result']
