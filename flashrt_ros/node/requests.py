"""Checks of what comes in: names, numbers, sizes; every refusal is a typed error."""

from __future__ import annotations

import math
from typing import Any, TYPE_CHECKING

from flashrt_ros.action import Generate
from flashrt_ros.capsule import names
from flashrt_ros.errors import InvalidArgument

if TYPE_CHECKING:
    from builtin_interfaces.msg import Duration

    from flashrt_ros.results import GenerateRequest

DEFAULT_SESSION = 'default'
# Bounds of a request, so that no client can make the node hold or tokenise without end.
MAX_TEXT_BYTES = 512 << 10
MAX_MESSAGES = 256
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BRANCHES = 64


def check_name(value: str, what: str = 'capsule') -> str:
    """
    Return a name that may be used as it is.

    :raises InvalidName: saying the rule.
    """
    return names.check_name(value, what)


def session_name(value: str) -> str:
    """Return the session that a request means; '' is the default one."""
    return check_name(value, 'session') if value else DEFAULT_SESSION


def seconds(duration: Duration, field: str = 'timeout') -> float:
    """
    Return a duration in seconds; zero means "not given".

    :raises InvalidArgument: it is negative.
    """
    value = duration.sec + duration.nanosec * 1e-9
    if value < 0:
        raise InvalidArgument(f'{field} must not be negative; zero takes the parameter of the '
                              'node.')
    return value


def choice(field: str, value: int, labels: tuple[str, ...]) -> int:
    """Return an enumerated value that is one of the named ones, counted from 0."""
    if value >= len(labels):
        allowed = ', '.join(f'{index} ({name})' for index, name in enumerate(labels))
        raise InvalidArgument(f'{field} must be one of {allowed}; {value} is not.')
    return value


def check_text(field: str, value: str) -> str:
    """Return a text of a conversation, whose size is bounded."""
    limit = MAX_TEXT_BYTES
    if len(value) > limit or len(value.encode('utf-8', 'replace')) > limit:
        raise InvalidArgument(
            f'{field} is longer than {limit} bytes, the most that one request may carry: '
            'send it in several turns.')
    return value


def generate_request(goal: Generate.Goal, parameters: Any) -> GenerateRequest:
    """
    Turn a goal into the engine's request, with the node's parameters where it says nothing.

    :param parameters: maps parameter names to values.
    :raises FlashrtError: a field is not allowed, or fields contradict.
    """
    from flashrt_ros.results import GenerateRequest

    sources = [bool(goal.prompt), len(goal.messages) > 0, len(goal.token_ids) > 0]
    if sum(sources) > 1:
        raise InvalidArgument('Give at most one of prompt, messages and token_ids.')
    if goal.raw and not goal.prompt:
        raise InvalidArgument('raw only goes with prompt: token_ids are raw by nature, messages '
                              'are always rendered.')
    check_text('prompt', goal.prompt)
    if len(goal.messages) > MAX_MESSAGES:
        raise InvalidArgument(f'messages holds more than {MAX_MESSAGES} messages: send them in '
                              'several goals.')
    total = 0
    for message in goal.messages:
        if not message.role:
            raise InvalidArgument("Each message needs a role such as 'system' or 'user'.")
        total += len(check_text('messages', message.role + message.content))
    if total > MAX_TEXT_BYTES:
        raise InvalidArgument(f'messages is longer than {MAX_TEXT_BYTES} bytes in all.')
    if len(goal.token_ids) > parameters['context.max_tokens']:
        raise InvalidArgument(
            f'token_ids holds {len(goal.token_ids)} tokens, more than the context '
            f"({parameters['context.max_tokens']}).")
    if any(token < 0 for token in goal.token_ids):
        raise InvalidArgument('token_ids must not hold negative numbers.')
    if len(goal.stop) > MAX_STOPS or any(
            not stop or len(stop) > MAX_STOP_CHARACTERS for stop in goal.stop):
        raise InvalidArgument(f'stop takes at most {MAX_STOPS} strings of 1 to '
                              f'{MAX_STOP_CHARACTERS} characters.')
    if goal.max_tokens < -1:
        raise InvalidArgument('max_tokens must be -1 (the parameter generation.max_tokens), 0 '
                              '(prefill only) or positive.')
    temperature = _unset(goal.temperature, parameters['generation.temperature'])
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidArgument('temperature must be -1 (the parameter generation.temperature), 0 '
                              '(greedy) or a positive number.')
    top_p = _unset(goal.top_p, parameters['generation.top_p'])
    if not 0 < top_p <= 1:
        raise InvalidArgument('top_p must be -1 (the parameter generation.top_p) or above 0 and '
                              'at most 1.')
    top_k = _unset(goal.top_k, parameters['generation.top_k'])
    if top_k < 0:
        raise InvalidArgument('top_k must be -1 (the parameter generation.top_k), 0 (no limit) or '
                              'positive.')
    on_cancel = choice('on_cancel', goal.on_cancel, ('KEEP', 'ROLLBACK'))
    return GenerateRequest(
        session=session_name(goal.session),
        prompt=goal.prompt or None,
        messages=tuple((message.role, message.content) for message in goal.messages),
        token_ids=tuple(int(token) for token in goal.token_ids),
        raw=goal.raw,
        capsule=check_name(goal.capsule) if goal.capsule else '',
        save_as=check_name(goal.save_as) if goal.save_as else '',
        max_tokens=parameters['generation.max_tokens'] if goal.max_tokens < 0 else goal.max_tokens,
        stop=tuple(goal.stop),
        temperature=temperature, top_p=top_p, top_k=int(top_k),
        seed=int(goal.seed) if goal.reseed else None,
        rollback_on_cancel=on_cancel == Generate.Goal.ROLLBACK)


def _unset(value: float, default: float) -> float:
    return default if value == -1 else value
