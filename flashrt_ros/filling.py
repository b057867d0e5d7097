"""
Requests that arrive as they were meant.

A message does not look at what it is given: a number that is too large wraps in silence or ends in
a SystemError on the way, a `numpy.int64` aborts the process on Kilted, a NUL cuts a text short and
a lone surrogate is an exception of the middleware. So clients fill requests here.
"""

from __future__ import annotations

import math
import operator
import re
from typing import Any

from builtin_interfaces.msg import Duration

from flashrt_ros.errors import InvalidArgument

_INTEGER = re.compile(r'(u?)int(8|16|32|64)')
_SEQUENCE = re.compile(r'sequence<(.+?)(?:, \d+)?>')
_LONGEST = (1 << 31) - 1  # seconds that a Duration can hold


def fill(kind: Any, **fields: Any) -> Any:
    """
    Return a message with fields as plain Python values.

    :param kind: the type of a message or request.
    :raises InvalidArgument: a value does not fit its field.
    :raises TypeError: there is no such field, or a value is of another type.
    """
    types = kind.get_fields_and_field_types()
    for name in fields:
        if name not in types:
            raise TypeError(f'{kind.__name__} has no field {name!r}; there are '
                            f'{", ".join(types)}')
    return kind(**{name: _fitting(name, types[name], value) for name, value in fields.items()})


def _fitting(name: str, kind: str, value: Any) -> Any:
    integer, sequence = _INTEGER.fullmatch(kind), _SEQUENCE.fullmatch(kind)
    if integer is not None:
        bits = int(integer[2])
        low, high = (0, (1 << bits) - 1) if integer[1] else (-1 << bits - 1, (1 << bits - 1) - 1)
        number = operator.index(value)
        if not low <= number <= high:
            raise InvalidArgument(f'{name} must be a whole number from {low} to {high}, not '
                                  f'{number}.')
        return number
    if kind == 'string':
        return _text(name, value)
    if kind == 'boolean':
        return bool(value)
    if kind in ('float', 'double'):
        return float(value)
    if sequence is not None:
        if isinstance(value, str):  # a sequence of its characters, which nobody means
            raise TypeError(f'{name} must be a sequence, not a string')
        return [_fitting(name, sequence[1], item) for item in value]
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f'{name} must be a string, not {type(value).__name__}')
    if '\0' in value:
        raise InvalidArgument(f'{name} holds a NUL character, behind which nothing would arrive: '
                              'leave it out.')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f'{name} holds bytes that are no UTF-8 text: convert or leave them '
                              'out.') from error
    return value


def to_duration(seconds: float) -> Duration:
    """
    Return a duration message.

    :raises InvalidArgument: it is not finite, or more than a message holds.
    """
    if not (math.isfinite(seconds) and abs(seconds) <= _LONGEST):
        raise InvalidArgument(f'a time must be a number of seconds of at most {_LONGEST}, not '
                              f'{seconds:g}.')
    whole = math.floor(seconds)  # of a negative time too the nanoseconds count upwards
    return Duration(sec=whole, nanosec=min(int((seconds - whole) * 1e9), 999_999_999))
