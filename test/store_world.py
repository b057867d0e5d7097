"""An engine and a reference that copies everything, driven side by side by one verb at a time."""

from engine_cases import ids
from naive import Naive

from flashrt_ros.control import Control
from flashrt_ros.engine import GenerateRequest
from flashrt_ros.errors import Capacity, ContextFull

VERBS = ('append', 'append', 'generate', 'generate', 'save', 'save', 'restore', 'restore', 'fork',
         'fork_live', 'rollback', 'rollback', 'drop', 'demote', 'sink', 'persist', 'pin', 'unpin',
         'unpin', 'close')
LENGTHS = (1, 2, 3, 5, 8, 20, 33, 60, 63, 64, 65, 90, 100, 130, 200, 511, 512, 513)
SETTINGS = ({}, {'temperature': 0.9}, {'temperature': 0.7, 'seed': 3}, {'temperature': 0.0})
SESSIONS = ('default', 'a', 'b')
NAMES = ('c0', 'c1', 'c2', 'c3', 'c4', 'c5')


class World:
    """
    Each verb takes one number, out of which it picks whom it is about; see ``pick``.

    A refusal for want of room is fine: then the engine must stand where the reference does.
    """

    def __init__(self, engine, naive: Naive) -> None:
        self.engine, self.naive = engine, naive
        self.sessions = {'default': naive.start()}
        self.capsules: dict = {}
        self.refused = 0
        self._number = 0

    def pick(self, things):
        """Take a choice out of the number."""
        things = list(things)
        self._number, index = divmod(self._number, len(things))
        return things[index]

    def attempt(self, verb, *args, **options):
        try:
            return verb(*args, **options)
        except (Capacity, ContextFull):
            self.refused += 1
            return None

    def do(self, verb: str, number: int) -> None:
        self._number = number
        needs_capsule = verb in ('restore', 'fork', 'drop', 'demote', 'persist', 'pin', 'unpin')
        if needs_capsule and not self.capsules:
            verb = 'save'
        getattr(self, verb)()

    def session(self) -> str:
        return self.pick(sorted(self.sessions))

    def capsule(self) -> str:
        return self.pick(sorted(self.capsules))

    def append(self):
        session, length, seed = self.pick(SESSIONS), self.pick(LENGTHS), self.pick(range(9))
        if self.attempt(self.engine.append, session, token_ids=ids(length, seed)):
            path = self.sessions.setdefault(session, self.naive.start())
            self.naive.append(path, ids(length, seed))

    def generate(self):
        session = self.session()
        if not self.sessions[session].now.position:
            return self.append()
        count, chosen = self.pick(range(1, 25)), self.pick(SETTINGS)
        cancel, undo = self.pick((None, None, 1, 5)), self.pick((False, True))
        control, seen = Control(), []

        def listen(piece):
            seen.extend(piece.token_ids)
            if cancel is not None and len(seen) == cancel:
                control.cancel()
        request = GenerateRequest(session, max_tokens=count, rollback_on_cancel=undo, **chosen)
        answer = self.attempt(self.engine.generate, request, listen, control)
        if answer is None:
            return None
        path = self.sessions[session]
        before = path.copy()
        wanted = count if cancel is None else min(count, cancel)
        assert self.naive.generate(path, wanted, **chosen) == answer.token_ids
        if undo and answer.finish_reason == 'canceled':
            self.sessions[session] = before
        return None

    def save(self):
        session, name = self.session(), self.pick(NAMES)
        if self.attempt(self.engine.save, session, name, overwrite=True,
                        persist=self.pick((False, False, True))):
            self.capsules[name] = self.sessions[session].copy()

    def restore(self):
        session, name = self.pick(SESSIONS), self.capsule()
        if self.attempt(self.engine.restore, session, name):
            self.sessions[session] = self.capsules[name].copy()

    def fork(self):
        session, name = self.pick(SESSIONS), self.capsule()
        if self.attempt(self.engine.fork, name, sessions=[session]):
            self.sessions[session] = self.capsules[name].copy()

    def fork_live(self):
        source, session = self.session(), self.pick(SESSIONS)
        if source != session and self.attempt(self.engine.fork, source_session=source,
                                              sessions=[session]):
            self.sessions[session] = self.sessions[source].copy()

    def rollback(self):
        session = self.session()
        path = self.sessions[session]
        goal = self.pick(sorted(path.past, reverse=True))
        result = self.attempt(self.engine.rollback, session, to='position', value=goal)
        if result:
            assert result.position == goal
            assert result.tokens_replayed <= path.now.position
            if goal < path.now.position:
                path.back(goal)

    def drop(self):
        name = self.capsule()
        self.engine.drop(name)
        del self.capsules[name]

    def demote(self):
        self.attempt(self.engine.demote, self.capsule())

    def sink(self):
        """Move a parked session down a tier."""
        parked = self.engine.session(self.session()).parked
        if parked is not None:
            self.attempt(self.engine.store.demote, parked)

    def persist(self):
        self.engine.persist(self.capsule())

    def pin(self):
        self.engine.pin(self.capsule(), True)

    def unpin(self):
        self.engine.pin(self.capsule(), False)

    def close(self):
        session = self.session()
        self.engine.close_session(session)
        del self.sessions[session]
        self.sessions.setdefault('default', self.naive.start())

    def check(self) -> None:
        """Live bytes, references, budgets."""
        live = next(s.name for s in self.engine.sessions() if s.resident)
        assert self.sessions[live].now.same(self.engine.arena), f'session {live} has other bytes'
        self.engine.audit()
        facts, config = self.engine.facts(), self.engine.config
        assert facts['pool_used_bytes'] <= facts['pool_bytes'] <= config.pool_bytes
        assert facts['host_used_bytes'] <= facts['host_bytes'] <= config.host_bytes

    def end(self) -> None:
        """Every capsule and session holds what the reference says; then give all back."""
        listed = {i.name for i in self.engine.list()}
        assert listed == set(self.capsules)
        for name, path in self.capsules.items():
            if self.attempt(self.engine.restore, 'probe', name):
                assert path.now.same(self.engine.arena), f'capsule {name} has other bytes'
        for name, path in self.sessions.items():
            if self.attempt(self.engine.rollback, name, to='tokens', value=0):
                assert path.now.same(self.engine.arena), f'session {name} has other bytes'
        for name in listed:
            self.engine.drop(name)
        for session in self.engine.sessions():
            self.engine.close_session(session.name)
        self.engine.lineage.forget()
