"""From a spec to a directory: the embedded model, a path, or a hub id in the local cache."""

from __future__ import annotations

import os
from pathlib import Path
import re

from flashrt_ros.errors import InvalidArgument, Storage

EMBEDDED = 'embedded'
_HUB_ID = re.compile(r'([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?')


def locate(spec: str) -> Path:
    """
    Return the checkpoint directory that ``spec`` names; nothing is downloaded.

    :raises InvalidArgument: for an empty spec.
    :raises Storage: when there is no such directory, or the hub id is not in the local cache.
    """
    if not spec.strip():
        raise InvalidArgument("the model spec is empty; give 'embedded', a directory, a hub id or "
                              "'random:<preset>'")
    if spec == EMBEDDED:
        directory = Path(__file__).resolve().parent.parent / 'assets' / 'planner'
        if not (directory / 'config.json').is_file():
            raise Storage('the embedded model is missing from this installation; install the '
                          'package again or name another model')
        return directory
    try:
        directory = Path(spec).expanduser()
        if directory.is_dir():
            return directory
    except (OSError, ValueError, RuntimeError) as error:  # too long, NUL, unknown ~user
        raise Storage(f'{spec[:80]!r} is no usable path ({error.__class__.__name__}); give a '
                      'directory with config.json') from error
    match = _HUB_ID.fullmatch(spec)
    if match:
        return _cached(match[1], match[2] or 'main')
    raise Storage(f'there is no model directory {spec!r}; give a directory with config.json, a '
                  "hub id that is in the local cache, 'embedded' or 'random:<preset>'")


def hub_cache() -> Path:
    """Return the hub cache as huggingface_hub places it (HF_HUB_CACHE, HF_HOME, XDG)."""
    env = os.environ
    if env.get('HF_HUB_CACHE'):
        return Path(os.path.expanduser(env['HF_HUB_CACHE']))
    if env.get('HF_HOME'):
        return Path(os.path.expanduser(env['HF_HOME'])) / 'hub'
    base = env.get('XDG_CACHE_HOME') or '~/.cache'
    return Path(os.path.expanduser(base)) / 'huggingface' / 'hub'


def _cached(repository: str, revision: str) -> Path:
    cache = hub_cache()
    home = cache / ('models--' + repository.replace('/', '--'))
    reference = home / 'refs' / revision
    try:
        commit = reference.read_text().strip() if reference.is_file() else revision
    except OSError as error:
        raise Storage(f'cannot read {reference}: {error.strerror}; check its '
                      'permissions') from error
    snapshot = home / 'snapshots' / commit
    if not re.fullmatch(r'[\w.-]+', commit) or commit in ('.', '..') or not snapshot.is_dir():
        raise Storage(f'{repository} ({revision}) is neither a directory nor in the local cache '
                      f'{cache}; nothing is downloaded here: run "hf download {repository}" where '
                      'there is a network, or give a directory')
    return snapshot
