"""The rules for what people call capsules and sessions, and note on them, in one place."""

from __future__ import annotations

import re

from flashrt_ros.errors import InvalidArgument, InvalidName

SUFFIX = '.capsule'
RULE = ('1 to 128 characters out of A-Z a-z 0-9 _ . - of which the first is a letter or a digit')
MAX_NOTE_BYTES = 4096
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.-]{0,127}')


def is_name(name: object) -> bool:
    """Tell whether ``name`` is a string that follows the rule."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(name: object, what: str = 'capsule') -> str:
    """
    Return ``name`` when it follows the rule.

    :param what: the kind of thing that is named, for the message.
    :raises InvalidName: otherwise, stating the rule.
    """
    if is_name(name):
        return name  # type: ignore[return-value]
    shown = ascii(name)
    if len(shown) > 60:
        length = f' ({len(name)} characters)' if isinstance(name, str) else ''
        shown = f'{shown[:40]}...{length}'
    raise InvalidName(f'The text {shown} cannot be the name of a {what}: a name is {RULE}.')


def check_note(note: str) -> str:
    """
    Return ``note`` when it is short enough: every listing and every header carries it.

    :raises InvalidArgument: otherwise, stating the rule.
    """
    taken = len(note.encode('utf-8', 'replace'))
    if taken > MAX_NOTE_BYTES:
        raise InvalidArgument(f'the note takes {taken} bytes of UTF-8 and may take '
                              f'{MAX_NOTE_BYTES}: shorten it, or note where the long text is.')
    return note
