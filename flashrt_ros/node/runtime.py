"""What exists while the node is configured: the engine and the worker that owns it."""

from __future__ import annotations

from collections.abc import Callable
import gc
import os
from typing import Any, TYPE_CHECKING

from flashrt_ros.errors import Canceled, Storage, UnknownCapsule
from flashrt_ros.node.requests import DEFAULT_SESSION

if TYPE_CHECKING:
    from rclpy.impl.rcutils_logger import RcutilsLogger

    from flashrt_ros.engine import Engine, EngineConfig
    from flashrt_ros.node.scheduling import Scheduling
    from flashrt_ros.worker import Worker


class Runtime:
    """
    Engine and worker, from `configure` to `cleanup`.

    :param config: what the parameters say.
    :param boot: name or id of the capsule that the default session starts from; '' for none.
    :param scheduling: of the threads, once there is one that computes.
    :param logger: is told of progress and of what fails while freeing.
    :param stopping: asked while loading; True abandons the load.
    :raises FlashrtError: with nothing left behind.
    """

    def __init__(self, config: EngineConfig, boot: str, scheduling: Scheduling,
                 logger: RcutilsLogger, stopping: Callable[[], bool]) -> None:
        from flashrt_ros.engine import Engine
        from flashrt_ros.worker import Worker

        def progress(line: str) -> None:
            logger.info(line)
            if stopping():
                raise Canceled('The node was told to stop while it was loading.')

        self._logger = logger
        self.scheduling = scheduling
        if config.directory and '://' not in config.directory:
            self._check_folder(config.directory)
        engine = Engine(config, progress=progress)
        worker: Worker | None = None
        try:
            if boot:
                self._boot(engine, boot)
            self.model: str = config.model
            self.facts: dict[str, Any] = dict(engine.facts())
            worker = Worker(engine)
            worker.start()
            # Not before: a load that hashes on all cores is nothing to prefer. Not later: torch's
            # threads are made by the first step, and inherit from the one that makes it.
            scheduling.apply(worker.thread_id)
        except BaseException:
            scheduling.undo()
            if worker is not None:
                worker.stop()
            engine.close()
            raise
        if scheduling.refused:
            logger.warning(scheduling.refused)
        self.worker = worker
        self.engine: Engine | None = engine
        # The model is as good as immortal: keep the collector from walking through it, whose
        # pauses would be the worst tokens.
        gc.collect()
        gc.freeze()

    def _check_folder(self, folder: str) -> None:
        """See at configure, not at the first save of a mission, that capsules have a place."""
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise Storage(f'capsules.directory {folder!r} cannot be made or is no directory '
                          f'({error.strerror}): name another one, or none.') from error
        if not os.access(folder, os.W_OK):
            self._logger.warning(f'capsules.directory {folder!r} is read-only: its capsules can '
                                 'be restored, and persist will fail.')

    def _boot(self, engine: Engine, boot: str) -> None:
        try:
            restored = engine.restore(DEFAULT_SESSION, boot)
        except UnknownCapsule as error:
            raise UnknownCapsule(
                f'capsules.boot names {boot!r}, which is not in capsules.directory: save a capsule '
                "of that name with persist, or set capsules.boot to ''.") from error
        self._logger.info(
            f'Session {DEFAULT_SESSION!r} starts from capsule {boot!r}: '
            f'{restored.tokens_reused} tokens')

    def persist_sessions(self, timeout: float) -> None:
        """
        Save each session as ``<session>.last``, on disk. Never raises.

        One without tokens is saved only over an older one, which is the past of another mind.
        """
        def work(engine: Engine) -> None:
            there = {capsule.name for capsule in engine.list()}
            for session in engine.sessions():
                name = f'{session.name[:123]}.last'
                if session.position > 0 or name in there:
                    try:
                        engine.save(session.name, name, overwrite=True,
                                    persist=True, note='saved at shutdown')
                    except Exception as error:
                        self._logger.error(
                            f'Session {session.name!r} was not saved at shutdown: {error}')
            engine.flush(timeout)
        try:
            self.worker.call(work).result(timeout)
        except Exception as error:
            self._logger.error(f'Sessions were not all saved at shutdown: {error!r}')

    def close(self, timeout: float) -> bool:
        """Stop the worker and free everything; return whether the worker ended in time."""
        stopped = False
        self.scheduling.undo()
        try:
            stopped = bool(self.worker.stop(timeout))
        except Exception as error:
            self._logger.error(f'The worker did not stop cleanly: {error!r}')
        engine, self.engine = self.engine, None
        if stopped and engine is not None:
            # Where the worker hangs, its engine is in use: leaking it is the lesser evil.
            try:
                engine.close()
            except Exception as error:
                self._logger.error(f'The engine did not close cleanly: {error!r}')
        del engine
        gc.unfreeze()
        gc.collect()
        return stopped
