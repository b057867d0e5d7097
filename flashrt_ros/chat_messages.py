"""Messages of a chat as callers give them, to the engine and to clients of the node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flashrt_ros.errors import InvalidArgument


def pairs(messages: Iterable[Any]) -> list[tuple[Any, Any]]:
    """
    Return messages as pairs of role and content.

    :raises InvalidArgument: one is something else; a dictionary of two would unpack to its keys.
    """
    found = []
    for message in messages:
        if isinstance(message, (str, bytes, Mapping)) or len(message) != 2:
            raise InvalidArgument("messages are pairs of role and content, such as ('user', "
                                  f"'hello'), not {str(message)[:60]!r}.")
        role, content = message
        found.append((role, content))
    return found
