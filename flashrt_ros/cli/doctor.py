"""`flashrt-ros doctor`: what this machine can do, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
import importlib
import os
from pathlib import Path
import platform
import tempfile

from flashrt_ros.cli import exits, output
from flashrt_ros.cli.opening import default_directory, JsonOption, ModelOption
from flashrt_ros.errors import FlashrtError

OK, WARN, MISSING = 'ok', 'warn', 'missing'


@dataclass
class Finding:
    """
    One line of the report.

    ``missing`` means that something needed is not there and decides the exit code; ``warn`` is
    something that is only slower, smaller or optional. ``remedy`` says what to do.
    """

    name: str
    status: str
    found: str
    remedy: str = ''


def doctor(model: ModelOption = 'embedded', as_json: JsonOption = False) -> int:
    """Examine this machine; exit code 1 if something that is needed is missing."""
    findings: list[Finding] = []
    for part in (_machine, _scheduling, _torch, _cuda, _libraries, _ros, _model, _directory):
        try:
            findings += part(model) if part is _model else part()  # type: ignore[call-arg]
        except Exception as error:  # an examination that fails is a finding as well
            findings.append(Finding(part.__name__.strip('_'), MISSING,
                                    f'{type(error).__name__}: {error}', 'report this as a bug'))
    healthy = all(finding.status != MISSING for finding in findings)
    if as_json:
        output.emit({'passed': healthy, 'findings': [asdict(finding) for finding in findings]})
    else:
        _print(findings, healthy)
    return exits.OK if healthy else exits.FAILED


def _print(findings: list[Finding], healthy: bool) -> None:
    from rich.table import Table
    from rich.text import Text
    marks = {OK: ('✓', 'green'), WARN: ('!', 'yellow'), MISSING: ('✗', 'bold red')}
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(style='bold', no_wrap=True)
    table.add_column(overflow='fold')
    for finding in findings:
        mark, style = marks[finding.status]
        text = Text(finding.found)
        if finding.remedy:
            text.append(f'\n→ {finding.remedy}', style)
        table.add_row(Text(mark, style), finding.name, text)
    console = output.people()
    console.print(table)
    console.print('[green]Nothing that is needed is missing.[/]' if healthy else
                  '[bold red]Something that is needed is missing; see the lines with ✗.[/]')


def _machine() -> Iterator[Finding]:
    import psutil
    cores, logical = psutil.cpu_count(logical=False), len(os.sched_getaffinity(0))
    yield Finding('system', OK, f'{platform.system()} {platform.release()}, '
                                f'{platform.machine()}, Python {platform.python_version()}')
    yield Finding('cpu', OK if logical > 1 else WARN,
                  f'{cpu_name()}, {logical} cores for this process'
                  + (f' ({cores} physical in the machine)' if cores else ''),
                  '' if logical > 1 else 'with one core, streaming and decoding take turns')
    memory = psutil.virtual_memory()
    enough = memory.available > 1 << 30
    yield Finding('memory', OK if enough else WARN,
                  f'{output.megabytes(memory.available)} of {output.megabytes(memory.total)} free',
                  '' if enough else 'close something: torch, model and pool want about 1 GiB')


def _scheduling() -> Iterator[Finding]:
    from flashrt_ros.node.scheduling import available_cores, granted_priority
    granted = granted_priority()
    cores = ', '.join(map(str, sorted(available_cores())))
    # Nothing that is needed: without, the system shares its cores out as it does with everyone.
    yield Finding('scheduling', OK, f'thread_priority up to {max(0, granted - 1)}, cpu_affinity '
                  f'of {cores}{_spared()}', '' if granted > 1 else
                  'for a node that goes before other programs (thread_priority): rtprio in '
                  '/etc/security/limits.conf, LimitRTPRIO= of the unit, or --cap-add SYS_NICE')


def _spared() -> str:
    """Say what the kernel keeps from threads with a priority, so that none can lock it up."""
    try:
        runtime, period = (int(Path(f'/proc/sys/kernel/sched_rt_{name}_us').read_text())
                           for name in ('runtime', 'period'))
    except (OSError, ValueError):
        return ''
    share = 'all' if runtime < 0 else f'{runtime / period:.0%}'
    return f'; threads with a priority get {share} of a core'


def cpu_name() -> str:
    """Return the name of the processor."""
    try:
        with open('/proc/cpuinfo', encoding='utf-8') as lines:
            for line in lines:
                if line.startswith(('model name', 'Model')):
                    return line.split(':', 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or 'unknown processor'


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding('torch', MISSING, str(error), 'pip install torch')
        return
    capability = torch.backends.cpu.get_cpu_capability()
    wide = capability not in ('DEFAULT', 'NO AVX')
    yield Finding('torch', OK if wide else WARN,
                  f'{torch.__version__}, {torch.get_num_threads()} threads, {capability}',
                  '' if wide else 'this processor has no wide vectors: decoding will be slow')


def _cuda() -> Iterator[Finding]:
    import torch
    if not torch.cuda.is_available():
        yield Finding('cuda', OK, 'no CUDA device that torch can use; models run on the CPU')
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield Finding(f'cuda {index}', OK, f'{device.name}, '
                      f'{output.megabytes(device.total_memory)}, compute capability '
                      f'{device.major}.{device.minor}, CUDA {torch.version.cuda}')
    from flashrt_ros.cuda import available, nvrtc
    reason = available.why_not()
    if reason:
        yield Finding('cuda plan', WARN, reason, 'until then models run on the CPU')
        return
    try:
        major, minor = nvrtc.compiler().version
        yield Finding('nvrtc', OK, f'{major}.{minor}, compiles the kernels at first start')
    except FlashrtError as error:
        yield Finding('nvrtc', WARN, str(error), "pip install 'flashrt_ros[gpu]'")


def _libraries() -> Iterator[Finding]:
    for module, need in (('tokenizers', True), ('safetensors', True), ('jinja2', True),
                         ('blake3', True), ('transformers', False)):
        try:
            found = importlib.import_module(module)
            yield Finding(module, OK, getattr(found, '__version__', 'installed'))
        except ImportError as error:
            yield Finding(module, MISSING if need else WARN, str(error),
                          f'pip install {module}' + ('' if need else
                                                     '; only `bench` compares with it'))


def _ros() -> Iterator[Finding]:
    distribution = os.environ.get('ROS_DISTRO', '')
    try:
        import rclpy
    except ImportError as error:
        yield Finding('ros', MISSING, f'rclpy does not import: {error}',
                      'source /opt/ros/<distro>/setup.bash, or run `make setup`, which installs '
                      'ROS 2 wheels; verify, bench and capsule work without')
        return
    where = Path(rclpy.__file__).parent
    yield Finding('ros', OK, f'{distribution or "ROS 2 from wheels"}, rclpy in {where}, '
                             f'middleware {_middleware()}, domain '
                             f'{os.environ.get("ROS_DOMAIN_ID", "0")}')
    try:
        importlib.import_module('flashrt_ros.action')
        from flashrt_ros.msg import Token
        Token()
        yield Finding('interfaces', OK, 'messages, services and the action import')
    except Exception as error:
        yield Finding('interfaces', MISSING, f'{type(error).__name__}: {error}',
                      'build them: `colcon build` and source install/setup.bash, or `make setup`')


def _middleware() -> str:
    try:
        from rclpy.utilities import get_rmw_implementation_identifier
        return get_rmw_implementation_identifier()
    except Exception as error:
        return f'unknown ({error})'


def _model(spec: str) -> Iterator[Finding]:
    if spec.startswith('random:'):
        yield Finding('model', OK, f'{spec} needs no file')
        return
    from flashrt_ros.errors import FlashrtError
    from flashrt_ros.models.locate import locate
    try:
        directory = locate(spec)
    except FlashrtError as error:
        yield Finding('model', MISSING, f'{spec}: {error}', 'name one with --model, or reinstall '
                      'the package: the embedded model comes with it')
        return
    size = sum(path.stat().st_size for path in directory.glob('*.safetensors'))
    yield Finding('model', OK if size else MISSING, f'{spec} in {directory}, '
                  f'{output.megabytes(size)} of weights',
                  '' if size else 'there are no *.safetensors files in it')


def _directory() -> Iterator[Finding]:
    directory = default_directory()
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        count = len(list(directory.glob('*.capsule')))
        yield Finding('capsules', OK, f'{directory} is writable'
                      + (f', {count} capsules' if directory.exists() else ' once it is made'))
    except OSError as error:
        yield Finding('capsules', WARN, f'{directory}: {error.strerror}',
                      'set FLASHRT_CAPSULES or capsules.directory to a directory you may write to')
