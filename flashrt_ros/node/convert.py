"""
The one place where messages are filled.

A ``numpy.int64`` or ``None`` in a field aborts the process on Kilted, 70000 in a ``uint16`` wraps
in silence, and a NUL ends a string on the wire. So everything that goes into a message passes
here: plain Python numbers in range, plain bools, text without NUL and lone surrogates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TYPE_CHECKING

from builtin_interfaces.msg import Duration, Time
from unique_identifier_msgs.msg import UUID

from flashrt_ros.action import Generate
from flashrt_ros.errors import FlashrtError, Internal
from flashrt_ros.msg import CapsuleInfo, CapsuleList, ErrorCode, NodeState, SessionState, Token

if TYPE_CHECKING:
    from flashrt_ros.results import CapsuleInfo as EngineCapsule
    from flashrt_ros.results import Generation, SessionInfo

_REPLACEMENT = '\N{REPLACEMENT CHARACTER}'
_TIERS = {'device': CapsuleInfo.DEVICE, 'host': CapsuleInfo.HOST, 'disk': CapsuleInfo.DISK}
_FINISH = {'stop': Token.STOP, 'length': Token.LENGTH, 'canceled': Token.CANCELED,
           'preempted': Token.PREEMPTED, 'timeout': Token.TIMEOUT, 'error': Token.ERROR}
_MAX_ERROR_CHARACTERS = 2000


def text(value: object) -> str:
    """Return text that survives DDS: NUL and lone surrogates become U+FFFD."""
    out = '' if value is None else str(value)
    if '\0' in out:
        out = out.replace('\0', _REPLACEMENT)
    try:
        out.encode('utf-8')
    except UnicodeEncodeError:
        out = ''.join(_REPLACEMENT if 0xD800 <= ord(c) <= 0xDFFF else c for c in out)
    return out


def unsigned(value: Any, bits: int = 64) -> int:
    """Return an int within ``[0, 2**bits)``; what lies outside is cut to the nearest end."""
    return min(max(int(value or 0), 0), (1 << bits) - 1)


def token_ids(values: Iterable[Any]) -> list[int]:
    """Return token ids as plain ints that fit an int32."""
    return [min(max(int(value), -(1 << 31)), (1 << 31) - 1) for value in values]


def duration(value: float) -> Duration:
    """Return a span of seconds, cut to what the message can hold."""
    value = min(max(float(value), 0.0), float((1 << 31) - 1))
    whole = int(value)
    return Duration(sec=whole, nanosec=min(int((value - whole) * 1e9), 999_999_999))


def wall_time(value: float) -> Time:
    """Return a moment of the wall clock (Unix seconds)."""
    value = min(max(float(value or 0.0), 0.0), float((1 << 31) - 1))
    whole = int(value)
    return Time(sec=whole, nanosec=min(int((value - whole) * 1e9), 999_999_999))


def finish_reason(value: Any) -> int:
    """Return the Token constant for the engine's reason, ERROR for an unknown one."""
    return _FINISH.get(str(getattr(value, 'value', value)), Token.ERROR)


def error_code(error: BaseException | None) -> int:
    """Return the code of an error; what has no type is INTERNAL."""
    if error is None:
        return ErrorCode.NONE
    name = error.code if isinstance(error, FlashrtError) else Internal.code
    return int(getattr(ErrorCode, name, ErrorCode.UNKNOWN))


def error_text(error: BaseException | None) -> str:
    """Return a whole sentence for an error, bounded in length."""
    if error is None:
        return ''
    if isinstance(error, FlashrtError):
        return text(error)[:_MAX_ERROR_CHARACTERS]
    return text(f'Internal fault, {type(error).__name__}: {error}. The log of the node tells '
                'where; please report it.')[:_MAX_ERROR_CHARACTERS]


def fail(response: Any, error: BaseException) -> Any:
    """Fill an answer that carries `error_code` and `error_msg` with an error."""
    response.error_code = error_code(error)
    response.error_msg = error_text(error)
    return response


def capsule_info(info: EngineCapsule | None) -> CapsuleInfo:
    """Return the message for a capsule; empty for None."""
    if info is None:
        return CapsuleInfo()
    tiers = 0
    for tier in info.tiers:
        tiers |= _TIERS.get(str(tier), 0)
    return CapsuleInfo(
        name=text(info.name), id=text(info.id), parent_id=text(info.parent_id),
        session=text(info.session), fingerprint=text(info.fingerprint),
        tokens=unsigned(info.tokens), bytes=unsigned(info.bytes),
        bytes_exclusive=unsigned(info.bytes_exclusive), tiers=tiers, pinned=bool(info.pinned),
        aligned=bool(info.aligned), exact_future=bool(info.exact_future),
        created=wall_time(info.created), note=text(info.note))


def capsule_list(infos: Iterable[EngineCapsule],
                 known: Mapping[EngineCapsule, CapsuleInfo] = MappingProxyType({})) -> CapsuleList:
    """
    Return the message for all capsules, sorted by name.

    :param known: messages that were filled before: of a thousand capsules, few are new.
    """
    return CapsuleList(capsules=[
        known.get(info) or capsule_info(info) for info in sorted(infos, key=lambda i: i.name)])


def session_state(info: SessionInfo, busy: bool) -> SessionState:
    """Return the message for a session."""
    return SessionState(
        name=text(info.name), position=unsigned(info.position), capacity=unsigned(info.capacity),
        epoch=unsigned(info.epoch), busy=bool(busy or info.busy), resident=bool(info.resident))


def node_state(lifecycle: str, model: str, sessions: Iterable[SessionInfo], busy: set[str],
               queue_length: int) -> NodeState:
    """Return the latched state of the node."""
    ordered = sorted(sessions, key=lambda info: info.name)
    return NodeState(
        lifecycle=text(lifecycle), model=text(model),
        sessions=[session_state(info, info.name in busy) for info in ordered],
        queue_length=unsigned(queue_length, 32))


def token(stamp: Time, session: str, goal_id: UUID, *, epoch: int, seq: int, index: int,
          position: int, words: str, ids: Iterable[int], finish: int = Token.RUNNING,
          into: Token | None = None) -> Token:
    """Return one message of a stream: a new one, or `into`, all of whose fields are set anew."""
    message = Token() if into is None else into
    message.stamp = stamp
    message.session = text(session)
    message.goal_id = goal_id
    message.epoch = unsigned(epoch)
    message.seq = unsigned(seq, 32)
    message.index = unsigned(index, 32)
    message.position = unsigned(position)
    message.text = text(words)
    message.token_ids = token_ids(ids)
    message.finish_reason = int(finish)
    return message


def generate_result(error: BaseException | None, reason: int, generation: Generation | None,
                    place: tuple[int, int] = (0, 0)) -> Generate.Result:
    """
    Return the result of a goal; without a generation it carries the code and the place.

    :param place: epoch and position of the session, where there is no generation to tell them.
    """
    result = Generate.Result(
        error_code=error_code(error), error_msg=error_text(error), finish_reason=int(reason),
        epoch=unsigned(place[0]), position=unsigned(place[1]))
    if generation is None:
        return result
    result.text = text(generation.text)
    result.token_ids = token_ids(generation.token_ids)
    result.prompt_tokens = unsigned(generation.tokens_reused + generation.tokens_prefilled)
    result.tokens_reused = unsigned(generation.tokens_reused)
    result.tokens_prefilled = unsigned(generation.tokens_prefilled)
    result.completion_tokens = unsigned(generation.completion_tokens)
    result.time_to_first_token = duration(generation.time_to_first_token or 0.0)
    result.tokens_per_second = float(generation.tokens_per_second or 0.0)
    result.epoch = unsigned(generation.epoch)
    result.position = unsigned(generation.position)
    result.info = capsule_info(generation.info)
    return result
