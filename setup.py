"""
Build one wheel: `pip install .` runs the same CMake as colcon and packs what it installs.

The interfaces need a ROS 2 to build on. With build isolation pip brings the ROS 2 wheels that
pyproject.toml names; without, those of the environment are used. Where a ROS 2 is installed on the
system, this door is closed: the wheel's type support would not be found there.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
NAME = 'flashrt_ros'
# rosidl version -> ROS 2 distribution
DISTRIBUTIONS = {'4.6': 'jazzy', '4.9': 'kilted'}


def package_version(package_xml: pathlib.Path) -> str:
    """Return the version that a package.xml states."""
    version = ElementTree.parse(package_xml).findtext('version')
    assert version, f'{package_xml} states no version'
    return version


def ros_prefix() -> pathlib.Path | None:
    """Return the prefix of the ROS 2 wheels that this interpreter sees, None where it sees none."""
    for folder in map(pathlib.Path, sys.path):
        if (folder / 'rosidl_cmake').is_dir():
            prefix = folder.parents[2]  # PREFIX/lib/python3.x/site-packages
            if (prefix / 'share' / 'rosidl_cmake' / 'package.xml').is_file():
                return prefix
    return None


def distribution(prefix: pathlib.Path) -> str:
    """Return the name of the ROS 2 distribution in a prefix."""
    version = package_version(prefix / 'share' / 'rosidl_cmake' / 'package.xml')
    minor = '.'.join(version.split('.')[:2])
    return DISTRIBUTIONS.get(minor, f'rosidl{minor}')


def refuse_system_ros() -> None:
    """Stop where the wheel would be installed beside a ROS 2 that is no wheel."""
    for folder in filter(None, os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep)):
        prefix = pathlib.Path(folder)
        from_wheels = any(prefix.glob('lib/python3*/site-packages/ros_wheels_bootstrapper'))
        if (prefix / 'share' / 'rclpy').is_dir() and not from_wheels:
            sys.exit(
                f'A ROS 2 is sourced in this shell ({folder}), and a wheel of {NAME} would not '
                'find its type support beside it. Build with `colcon build`, or with `make`.')


class BuildInterfaces(build_ext):
    """Run CMake, then take the whole package from its installation."""

    def run(self) -> None:
        """Build, install into a stage and distribute the stage over the wheel."""
        prefix = ros_prefix()
        if prefix is None:
            sys.exit(
                f'{NAME} needs a ROS 2 to build its interfaces on. Without one on this machine run '
                '`pip install .` with build isolation, or first '
                '`pip install -r requirements/ros.txt -r requirements/ros-build.txt`.')
        tag = f'{distribution(prefix)}-{sys.implementation.cache_tag}'
        build = ROOT / 'build' / tag
        stage = ROOT / 'build' / f'{tag}-stage'
        self.cmake(prefix, build, stage)
        self.distribute(stage)

    def cmake(self, prefix: pathlib.Path, build: pathlib.Path, stage: pathlib.Path) -> None:
        """Configure, build and install into the stage, which is emptied first."""
        path = os.pathsep.join([str(prefix / 'bin'), os.environ.get('PATH', '')])
        modules = prefix / 'lib' / f'python3.{sys.version_info.minor}' / 'site-packages'
        env = dict(
            os.environ, PATH=path, AMENT_PREFIX_PATH=str(prefix), CMAKE_PREFIX_PATH=str(prefix),
            LD_LIBRARY_PATH=str(prefix / 'lib'), PYTHONPATH=str(modules))
        cache = build / 'CMakeCache.txt'
        if cache.is_file() and f'ament_cmake_DIR:PATH={prefix}/' not in cache.read_text():
            shutil.rmtree(build)  # built on another prefix, such as a former isolated build
        configure = ['cmake', '-S', str(ROOT), '-B', str(build), f'-DCMAKE_INSTALL_PREFIX={stage}',
                     '-DCMAKE_BUILD_TYPE=Release', '-DBUILD_TESTING=OFF', '-DFLASHRT_UNITY=ON',
                     f'-DPython3_EXECUTABLE={sys.executable}']
        if shutil.which('ninja') and not cache.is_file():
            configure += ['-G', 'Ninja']
        jobs = str(os.cpu_count() or 1)
        shutil.rmtree(stage, ignore_errors=True)
        for command in (configure, ['cmake', '--build', str(build), '--parallel', jobs],
                        ['cmake', '--install', str(build)]):
            print('+', ' '.join(command), flush=True)
            subprocess.run(command, env=env, check=True)

    def distribute(self, stage: pathlib.Path) -> None:
        """Copy the package to the build folder, and name everything else as data files."""
        [package] = [*stage.glob(f'lib/python3*/*-packages/{NAME}'),
                     *stage.glob(f'local/lib/python3*/*-packages/{NAME}')]
        target = pathlib.Path(self.build_lib) / NAME
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(package, target)
        data: dict[str, list[str]] = {}
        for path in [*stage.glob('lib/*.so'), *stage.glob(f'lib/{NAME}/*'),
                     *stage.glob('share/**/*')]:
            if path.is_file():
                folder = str(path.parent.relative_to(stage))
                data.setdefault(folder, []).append(str(path.relative_to(ROOT)))
        self.distribution.data_files = sorted(data.items())


refuse_system_ros()
_prefix = ros_prefix()
_version = package_version(ROOT / 'package.xml')
setup(
    version=f'{_version}+{distribution(_prefix)}' if _prefix else _version,
    packages=[NAME],
    # Without sources of its own: it says that the wheel is bound to a platform and a Python.
    ext_modules=[Extension(f'{NAME}._interfaces', [])],
    cmdclass={'build_ext': BuildInterfaces},
)
