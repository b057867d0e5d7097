"""
Typed exceptions of the engine, one for each error code of the ROS interface.

Every message is a whole sentence that says what was wrong and what to do next, because it must
stand alone in a log line or in the ``error_msg`` of a service response.
"""

from __future__ import annotations


class FlashrtError(Exception):
    """Base of all refusals and faults; ``code`` is the name of a constant in ``ErrorCode.msg``."""

    code = 'INTERNAL'


class NotActive(FlashrtError):
    """The node or engine is not in a state that serves requests."""

    code = 'NOT_ACTIVE'


class Busy(FlashrtError):
    """The session or the engine is occupied and the caller asked not to wait."""

    code = 'BUSY'


class DeadlineExceeded(FlashrtError):
    """The deadline of the caller passed."""

    code = 'TIMEOUT'


class Canceled(FlashrtError):
    """The caller cancelled the request; the state is the last committed boundary."""

    code = 'CANCELED'


class Preempted(FlashrtError):
    """Another request took the engine."""

    code = 'PREEMPTED'


class UnknownSession(FlashrtError):
    """No session has this name."""

    code = 'UNKNOWN_SESSION'


class UnknownCapsule(FlashrtError):
    """No capsule has this name or id."""

    code = 'UNKNOWN_CAPSULE'


class InvalidName(FlashrtError):
    """A session or capsule name breaks the naming rule."""

    code = 'INVALID_NAME'


class InvalidArgument(FlashrtError):
    """A value is out of range or a combination makes no sense."""

    code = 'INVALID_ARGUMENT'


class NameExists(FlashrtError):
    """The capsule name is taken and overwriting was not asked for."""

    code = 'NAME_EXISTS'


class Capacity(FlashrtError):
    """A budget (pool, sessions, queue, memory) cannot hold the request."""

    code = 'CAPACITY'


class Incompatible(FlashrtError):
    """A capsule or checkpoint was made for something else; the differing fields are named."""

    code = 'INCOMPATIBLE'


class Corrupt(FlashrtError):
    """A file is truncated, altered or malformed."""

    code = 'CORRUPT'


class ContextFull(FlashrtError):
    """The context capacity cannot hold the tokens asked for; nothing was changed."""

    code = 'CONTEXT_FULL'


class Storage(FlashrtError):
    """The file system refused (full, read-only, missing)."""

    code = 'STORAGE'


class DeviceFault(FlashrtError):
    """The compute device failed or the live state is marked invalid."""

    code = 'DEVICE'


class Internal(FlashrtError):
    """A fault of this package."""

    code = 'INTERNAL'


BY_CODE = {cls.code: cls for cls in FlashrtError.__subclasses__()}
