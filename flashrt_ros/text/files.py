"""Read the text side of a Hugging Face model directory: bounded, typed, nothing executed."""

from __future__ import annotations

from dataclasses import dataclass, field
import json
from pathlib import Path
from typing import Any

from flashrt_ros.errors import Corrupt, Incompatible, Storage

MAX_TOKENIZER_BYTES = 256 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20

#: Configuration keys that name one special token each, in the order templates know them.
NAMED_TOKENS = (
    'bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token')


@dataclass
class TextFiles:
    """What was found in a directory."""

    raw: str
    tokenizer: dict[str, Any]
    named: dict[str, str] = field(default_factory=dict)
    extra: dict[int, dict[str, Any]] = field(default_factory=dict)
    declared: list[str] = field(default_factory=list)
    template: str | None = None


def read(directory: Path) -> TextFiles:
    """
    Read ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of ``directory``.

    :raises Storage: a file or the directory cannot be read.
    :raises Corrupt: a file is not what its name says.
    :raises Incompatible: the tokenizer is stored in a form that is not supported.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise Storage(
            f'{str(directory)!r} is not a directory; give the directory that holds tokenizer.json.')
    path = directory / 'tokenizer.json'
    if not path.is_file():
        others = [name for name in ('tokenizer.model', 'vocab.json', 'tekken.json', 'vocab.txt')
                  if (directory / name).is_file()]
        if others:
            raise Incompatible(
                f'{str(directory)!r} holds {others[0]} but no tokenizer.json; convert it once '
                'with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)).')
        raise Storage(
            f'{str(directory)!r} has no tokenizer.json; copy the tokenizer files of the model '
            'next to its config.json.')
    raw = _text(path, MAX_TOKENIZER_BYTES)
    tokenizer = _parse(path.name, raw)
    config = _optional(directory / 'tokenizer_config.json')
    legacy = _optional(directory / 'special_tokens_map.json')
    named = {}
    for key in NAMED_TOKENS:
        value = config.get(key, legacy.get(key))
        if isinstance(value, dict):
            value = value.get('content')
        if isinstance(value, str) and value:
            named[key] = value
        elif value not in (None, ''):
            raise Corrupt(
                f'tokenizer_config.json: {key} is neither a string nor a token object; '
                'restore the file from its origin.')
    return TextFiles(raw, tokenizer, named, _extra(config), _declared(config),
                     _template(directory, config))


def _extra(config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the added tokens that ``tokenizer_config.json`` declares, by id."""
    declared = config.get('added_tokens_decoder') or {}
    try:
        extra = {int(key): dict(value) for key, value in declared.items()}
        if all(isinstance(value['content'], str) for value in extra.values()):
            return extra
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise Corrupt(
        'tokenizer_config.json: added_tokens_decoder is malformed; restore the file from its '
        'origin.')


def _declared(config: dict[str, Any]) -> list[str]:
    """Return the further special tokens that ``tokenizer_config.json`` lists."""
    found: list[str] = []
    for key in ('extra_special_tokens', 'additional_special_tokens'):
        listed = config.get(key) or []
        tokens = list(listed.values()) if isinstance(listed, dict) else listed
        if not isinstance(tokens, list):
            tokens = [None]
        for token in (t.get('content') if isinstance(t, dict) else t for t in tokens):
            if not isinstance(token, str):
                raise Corrupt(f'tokenizer_config.json: {key} is no list of tokens; restore the '
                              'file from its origin.')
            found.append(token)
    return list(dict.fromkeys(found))


def _template(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the default chat template: its own file first, as transformers does, then JSON."""
    path = directory / 'chat_template.jinja'
    if path.is_file():
        return _text(path, MAX_TEMPLATE_BYTES)
    found = config.get('chat_template')
    if found is None:
        found = _optional(directory / 'chat_template.json').get('chat_template')
    if isinstance(found, list):
        try:
            found = {item['name']: item['template'] for item in found}
        except (KeyError, TypeError) as error:
            raise Corrupt(
                'tokenizer_config.json: chat_template is a list without names; restore the file '
                'from its origin.') from error
    if isinstance(found, dict):
        if 'default' not in found and len(found) != 1:
            raise Incompatible(
                f'The tokenizer has the chat templates {sorted(map(str, found))} and none is '
                'called default; save the one to use as chat_template.jinja in the directory.')
        found = found['default'] if 'default' in found else next(iter(found.values()))
    if found is not None and not isinstance(found, str):
        raise Corrupt(
            'tokenizer_config.json: chat_template is not text; restore the file from its origin.')
    if found is not None and len(found.encode('utf-8', 'replace')) > MAX_TEMPLATE_BYTES:
        raise Corrupt(f'The chat template is larger than {MAX_TEMPLATE_BYTES} bytes; shorten it.')
    return found


def _optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return _parse(path.name, _text(path, MAX_CONFIG_BYTES))


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(
            f'{name} is not valid JSON ({error}); restore the file from its origin.'
        ) from error
    if not isinstance(value, dict):
        raise Corrupt(f'{name} is not a JSON object; restore the file from its origin.')
    return value


def _text(path: Path, limit: int) -> str:
    try:
        size = path.stat().st_size
        if size > limit:
            raise Corrupt(
                f'{path.name} has {size} bytes, more than the {limit} that such a file may have; '
                'check that it is the right file.')
        return path.read_bytes().decode('utf-8')
    except UnicodeDecodeError as error:
        raise Corrupt(
            f'{path.name} is not UTF-8 text; restore the file from its origin.') from error
    except OSError as error:
        raise Storage(
            f'{path.name} cannot be read ({error.strerror}); check its permissions.') from error
