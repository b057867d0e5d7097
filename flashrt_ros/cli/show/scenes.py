"""The scenes that come with the embedded planner, and how one is chosen."""

from __future__ import annotations

from dataclasses import dataclass
import json
from pathlib import Path

from flashrt_ros.errors import InvalidArgument, Storage


@dataclass(frozen=True)
class Scene:
    """A scene description (the reusable prefix) and spoken instructions that fit it."""

    title: str
    scene: str
    instructions: tuple[str, ...]


def directory() -> Path:
    """Return where the scenes of this installation are."""
    import flashrt_ros
    return Path(flashrt_ros.__file__).parent / 'assets' / 'planner' / 'scenes'


def load(wanted: str) -> Scene:
    """
    Return a scene by name, by part of its name, or by the path of a JSON file.

    :raises InvalidArgument: no scene or several are called so.
    :raises Storage: a file is missing or is no scene.
    """
    if wanted.endswith('.json'):
        return _read(Path(wanted))
    files = {path.stem: path for path in sorted(directory().glob('*.json'))}
    found = [wanted] if wanted in files else [name for name in files if wanted in name]
    if len(found) != 1:
        raise InvalidArgument(f'{len(found)} scenes are called {wanted!r}; choose one of '
                              f'{", ".join(files)}, or give the path of a JSON file.')
    return _read(files[found[0]])


def _read(path: Path) -> Scene:
    try:
        data = json.loads(path.read_text(encoding='utf-8'))
        users = tuple(item['user'] for item in data['instructions'])
        scene = Scene(str(data['title']), str(data['scene']), users)
    except OSError as error:
        raise Storage(f'the scene {str(path)!r} cannot be read: {error.strerror}.') from error
    except (ValueError, KeyError, TypeError) as error:
        raise Storage(f'{str(path)!r} is no scene: it needs "title", "scene" and "instructions" '
                      f'with a "user" each ({type(error).__name__}: {error}).') from error
    if len(scene.instructions) < 3:
        raise Storage(f'{str(path)!r} has {len(scene.instructions)} instructions; three are '
                      'needed.')
    return scene
