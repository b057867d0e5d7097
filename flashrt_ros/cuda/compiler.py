"""
Compile the CUDA sources of this package with NVRTC and keep the machine code on disk.

NVRTC needs no GPU and the sources include nothing, so any machine can compile for any
architecture. What is kept is named by a digest of source, options, architecture and NVRTC version,
and is written atomically: several processes may share the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import os
from pathlib import Path
import re

from flashrt_ros.cuda.nvrtc import compiler
from flashrt_ros.user_cache import user_cache

SOURCES = Path(__file__).with_name('sources')
HEADER = 'common.cuh'


def source_text(name: str) -> str:
    """Return a source with the helpers in front and our own headers in place."""
    return (f'{_read(HEADER)}\n#line 1 "{name}"\n'
            + re.sub(r'^#include "(\w+\.cuh)"$', _header, _read(name), flags=re.MULTILINE))


def _read(name: str) -> str:
    return (SOURCES / name).read_text(encoding='utf-8')


def _header(found: re.Match) -> str:
    return _read(found[1])


def sources_digest() -> str:
    """Return a digest of all sources, for the fingerprint."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b'\0' + path.read_bytes())
    return digest.hexdigest()


def compile_source(name: str, defines: Mapping[str, int | str], arch: str,
                   cache: Path | None = None) -> bytes:
    """
    Return the machine code (cubin) of ``sources/<name>``.

    :param defines: macros that settle sizes and variants.
    :param arch: for instance ``sm_90a``.
    :param cache: folder of kept code; left out, that of the user, and none without a home.
    :raises DeviceFault: if NVRTC is not there or refuses the source; the log is in the message.
    """
    nvrtc = compiler()
    text = source_text(name)
    options = [f'--gpu-architecture={arch}', '--std=c++17', '-default-device',
               *(f'-D{key}={value}' for key, value in sorted(defines.items()))]
    version = '.'.join(map(str, nvrtc.version))
    key = hashlib.sha256('\0'.join([text, *options, version]).encode()).hexdigest()
    if cache is None:
        home = user_cache()
        if home is None:
            return nvrtc.compile(name, text, options)
        cache = home / 'kernels'
    path = cache / f'{Path(name).stem}-{arch}-{key[:32]}.cubin'
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = nvrtc.compile(name, text, options)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f'.{os.getpid()}')
        temporary.write_bytes(code)
        temporary.replace(path)
    except OSError:
        pass  # a cache that cannot be kept costs time at the next start and nothing else
    return code

