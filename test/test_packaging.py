"""The package through its two doors: one version, light dependencies, everything installed."""
import ast
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import flashrt_ros
from flashrt_ros import msg

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = pathlib.Path(msg.__file__).resolve().parent.parent
MANIFEST = ElementTree.parse(ROOT / 'package.xml').getroot()
# What another name imports: rosdep keys, as in rosdep/python.yaml of ros/rosdistro.
KEYS = {'jinja2': 'python3-jinja2', 'numpy': 'python3-numpy', 'psutil': 'python3-psutil',
        'rich': 'python3-rich', 'hypothesis': 'python3-hypothesis', 'pytest': 'python3-pytest',
        'yaml': 'python3-yaml'}
# Imported without a key that a build farm can release: what pip calls them, '' where only those
# who have it use it.
NO_KEY = {'torch': 'torch', 'safetensors': 'safetensors', 'tokenizers': 'tokenizers',
          'blake3': 'blake3', 'fsspec': 'fsspec', 'typer': 'typer', 'transformers': 'transformers',
          'cuda': 'cuda_bindings', 'cupy': '', 'pynvml': ''}
HEAVY = ('torch', 'cupy', 'transformers', 'tokenizers', 'safetensors')


def prefix():
    """Return the prefix that flashrt_ros is installed in."""
    for folder in PACKAGE.parents:
        if (folder / 'share' / 'flashrt_ros' / 'package.xml').is_file():
            return folder
    raise AssertionError(f'no share/flashrt_ros above {PACKAGE}')


def came_as_a_wheel():
    """Tell through which door flashrt_ros was installed."""
    return importlib.metadata.distribution('flashrt_ros').read_text('WHEEL') is not None


def requirements(name):
    """Return the lines of a requirements file."""
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith(('#', '-r'))]


def files(folder):
    """Return the relative paths of all files below a folder, caches left out."""
    return {str(path.relative_to(folder)) for path in folder.rglob('*')
            if path.is_file() and '__pycache__' not in path.parts}


def test_the_tests_run_against_the_installed_package():
    assert pathlib.Path(flashrt_ros.__file__).resolve().parent == PACKAGE
    assert PACKAGE != ROOT / 'flashrt_ros'


def test_one_version_everywhere():
    version = MANIFEST.findtext('version')
    assert flashrt_ros.__version__ == version
    changes = (ROOT / 'CHANGELOG.rst').read_text()
    top = re.search(r'^(\d+\.\d+\.\d+)\b.*\n-+$', changes, re.MULTILINE)
    assert top and top[1] == version
    installed = importlib.metadata.distribution('flashrt_ros')
    public, _, local = installed.version.partition('+')
    assert public == version
    if came_as_a_wheel():
        assert local, 'a wheel says which ROS 2 distribution it was built on'


def test_package_xml_is_what_a_robot_can_install():
    named = {element.text for element in MANIFEST if element.tag.endswith('depend')}
    assert not [name for name in named if any(heavy in name for heavy in HEAVY)]
    assert {'rosidl_default_generators', 'rosidl_default_runtime', 'rclpy', 'ament_cmake'} <= named
    assert MANIFEST.get('format') == '3'
    assert MANIFEST.findtext('member_of_group') == 'rosidl_interface_packages'
    assert MANIFEST.findtext('export/build_type') == 'ament_cmake'
    assert MANIFEST.findtext('license') == 'Apache-2.0'
    assert 'Apache License' in (ROOT / 'LICENSE').read_text()


def imports(*folders):
    """Return the packages that the files below some folders import, their own and Python's out."""
    found = set()
    own = {path.stem for folder in ('test', 'tools') for path in (ROOT / folder).rglob('*.py')}
    for path in [path for folder in folders for path in (ROOT / folder).rglob('*.py')]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition('.')[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition('.')[0])
    return found - set(sys.stdlib_module_names) - own - {'flashrt_ros'}


def test_what_is_imported_is_declared():
    named = {element.text for element in MANIFEST
             if element.tag in ('depend', 'exec_depend', 'build_depend')}
    unkeyed = {name for name in imports('flashrt_ros', 'launch', 'scripts') if name not in named
               and KEYS.get(name) not in named}
    assert unkeyed == set(NO_KEY), 'declare it in package.xml, or say here why not'
    tests = named | {element.text for element in MANIFEST.findall('test_depend')}
    # xdist: imported only where it is what runs the tests, which is in `make test`
    assert {name for name in imports('test') if name not in tests
            and KEYS.get(name) not in tests} <= {*NO_KEY, 'xdist'}


def test_what_has_no_rosdep_key_comes_by_pip():
    listed = {re.split(r'[<>=\[]', line)[0].replace('-', '_')
              for name in ('runtime', 'torch', 'gpu', 'dev') for line in requirements(name)}
    assert {package for package in NO_KEY.values() if package} <= listed


def test_what_is_declared_is_imported():
    generated = {'action_msgs', 'builtin_interfaces', 'unique_identifier_msgs',
                 'rosidl_default_runtime'}
    used = imports('flashrt_ros', 'launch', 'test')
    used |= {KEYS[name] for name in used if name in KEYS}
    assert {element.text for element in MANIFEST
            if element.tag in ('depend', 'exec_depend', 'test_depend')} - generated - used == {
                'python3-pytest-timeout'}


def test_a_plain_install_stays_light():
    plain = requirements('runtime')
    assert not [line for line in plain if line.startswith(('ros-', 'torch', 'cupy'))]
    if not came_as_a_wheel():
        return  # CMake installed it, which requires nothing of pip
    installed = importlib.metadata.requires('flashrt_ros') or []
    hard = [line for line in installed if 'extra ==' not in line]
    assert not [line for line in hard if line.startswith(('ros-', 'torch', 'cupy'))]
    extras = set(importlib.metadata.metadata('flashrt_ros').get_all('Provides-Extra') or [])
    assert {'ros', 'torch', 'gpu', 'dev', 'behaviours'} <= extras


def test_one_list_of_build_requirements():
    text = (ROOT / 'pyproject.toml').read_text()
    block = re.search(r'^requires = \[\n(.*?)^\]', text, re.MULTILINE | re.DOTALL)[1]
    assert re.findall(r"'([^']+)'", block) == requirements('ros') + requirements('ros-build')


def test_constraints_pin_what_matters():
    pins = dict(line.split('==') for line in requirements('constraints'))
    assert pins['torch'] == '2.13.0'
    names = {re.split(r'[<>=]', line)[0].lower().replace('_', '-')
             for name in ('runtime', 'torch', 'behaviours', 'dev', 'ros', 'ros-build')
             for line in requirements(name)}
    assert names <= set(pins)


def test_every_definition_is_generated():
    listed = re.search(r'rosidl_generate_interfaces\((.*?)\)\n\n',
                       (ROOT / 'CMakeLists.txt').read_text(), re.DOTALL)[1]
    found = {f'{path.parent.name}/{path.name}' for kind in ('msg', 'srv', 'action')
             for path in (ROOT / kind).iterdir()}
    assert set(re.findall(r'(?:msg|srv|action)/\w+\.\w+', listed)) == found
    share = prefix() / 'share' / 'flashrt_ros'
    for name in found:
        assert (share / name).read_bytes() == (ROOT / name).read_bytes()


def test_cmake_keeps_the_order_that_loses_no_files():
    text = (ROOT / 'CMakeLists.txt').read_text()
    steps = ['rosidl_generate_interfaces(', 'ament_get_python_install_dir(',
             'install(DIRECTORY flashrt_ros/', 'ament_export_dependencies(rosidl_default_runtime)',
             'ament_package()']
    assert sorted(steps, key=text.index) == steps
    assert 'ament_python_install_package(' not in text


def test_the_whole_module_is_installed():
    source = files(ROOT / 'flashrt_ros')
    installed = files(PACKAGE)
    assert not source - installed
    extra = {name for name in installed - source if not name.startswith(
        ('msg/', 'srv/', 'action/', '_flashrt_ros_s', 'flashrt_ros_s__'))}
    assert not extra, 'installed files that the source tree no longer has'
    assert 'py.typed' in installed


def test_assets_are_installed_byte_for_byte():
    source = ROOT / 'flashrt_ros' / 'assets'
    assets = files(source)
    if not assets:
        pytest.skip('this tree has no assets')
    for name in assets:
        assert (PACKAGE / 'assets' / name).read_bytes() == (source / name).read_bytes()
    assert sum((source / name).stat().st_size for name in assets) <= 12 << 20


@pytest.mark.parametrize('folder', ['launch', 'config'])
def test_launch_and_config_are_shared(folder):
    assert files(ROOT / folder), f'{folder}/ is empty'
    assert files(prefix() / 'share' / 'flashrt_ros' / folder) == files(ROOT / folder)


@pytest.mark.parametrize('name', ['lib/flashrt_ros/capsule_node', 'bin/flashrt-ros'])
def test_programs_are_installed(name):
    path = prefix() / name
    assert path.is_file() and os.access(path, os.X_OK)


def test_command_runs_without_any_environment():
    env = {'PATH': os.environ['PATH'], 'HOME': os.environ.get('HOME', '/')}
    done = subprocess.run([str(prefix() / 'bin' / 'flashrt-ros'), '--help'], env=env, cwd='/',
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert 'demo' in done.stdout


def test_package_init_stays_empty():
    code = compile((PACKAGE / '__init__.py').read_text(), '__init__.py', 'exec')
    assert set(code.co_names) <= {'__doc__', '__version__'}
