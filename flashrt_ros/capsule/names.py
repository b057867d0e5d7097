"""The naming rule of capsules and sessions, in one place."""

from __future__ import annotations

import re

from flashrt_ros.errors import InvalidName

SUFFIX = '.capsule'
RULE = ('1 to 128 characters out of A-Z a-z 0-9 _ . - of which the first is a letter or a digit')
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
