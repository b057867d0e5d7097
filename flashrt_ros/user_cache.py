"""Where the caches of this user live; nothing is lost when they are gone."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Return our folder below ``$XDG_CACHE_HOME`` or ``~/.cache``; None without a home."""
    base = os.environ.get('XDG_CACHE_HOME', '')
    base = base if os.path.isabs(base) else os.path.expanduser('~/.cache')
    return Path(base) / 'flashrt_ros' if os.path.isabs(base) else None
