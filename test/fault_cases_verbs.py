"""Faults of aligned saves, forks, rollbacks, files, aborts, and leaks."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import torch

from flashrt_ros import aligned, sampling
from flashrt_ros.aligned import Aligned
from flashrt_ros.answering import Answering
from flashrt_ros.arena import Role
from flashrt_ros.capsule import codec
from flashrt_ros.capsule.boundary import HostState, Run, Schedule
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.cli.checks import process
from flashrt_ros.engine import Engine
from flashrt_ros.errors import FlashrtError
from flashrt_ros.session import Session
from flashrt_ros.sessions import Sessions

# -- aligned saves --------------------------------------------------------------------------------


def aligned_is_not(plant):
    """An aligned save is an ordinary one."""
    @plant.around(Engine, '_freeze_aligned')
    def freeze(whole, self, target, rebuild):
        frozen, copied = self._sessions.freeze(target)
        return Aligned(frozen, target.host, copied)


def tail_forgets(plant):
    """The unfolded tail of an aligned save lacks its first id."""
    @plant.around(Engine, '_freeze_aligned')
    def freeze(whole, self, target, rebuild):
        found = whole(self, target, rebuild)
        return replace(found, host=replace(found.host, tail=found.host.tail[1:]))


def rebuilt_off_the_grid(plant):
    """A rebuild prefills in other chunks than a cold prefill."""
    @plant.around(aligned, 'rebuild')
    def rebuild(whole, session, full, copied, live, empty, plan_of, make_room):
        def other(arena):
            plan = plan_of(arena)
            plan.grid //= 2
            return plan
        return whole(session, full, copied, live, empty, other, make_room)


# -- forks and rollbacks --------------------------------------------------------------------------


def forks_share_a_seed(plant):
    """A fork ignores the seeds it is given."""
    @plant.around(Engine, 'fork')
    def fork(whole, self, capsule='', *, source_session='', sessions, seeds=()):
        return whole(self, capsule, source_session=source_session, sessions=sessions)


def forks_share_a_block(plant):
    """Branches are seeded in the block that they share with each other and with the trunk."""
    @plant.around(Sessions, 'point')
    def point(whole, self, session, frozen, host, parent_id, seed):
        pool = self._lineage.pool
        if seed is not None:
            sampling.reseed(pool.manifest, pool.blocks[frozen.block], seed)
        return whole(self, session, frozen, host, parent_id, None)


def a_seed_marks_the_trunk(plant):
    """Branches have their seeds, and the trunk has that of the last."""
    @plant.around(Sessions, 'point')
    def point(whole, self, session, frozen, host, parent_id, seed):
        pool = self._lineage.pool
        if seed is not None:
            sampling.reseed(pool.manifest, pool.blocks[frozen.block], seed)
        return whole(self, session, frozen, host, parent_id, seed)


def fork_of_a_session_takes_its_parent(plant):
    """A fork off a session branches off the capsule that it came from."""
    @plant.around(Engine, 'fork')
    def fork(whole, self, capsule='', *, source_session='', sessions, seeds=()):
        if source_session:
            capsule = self.session(source_session).parent_id
        return whole(self, capsule, sessions=sessions, seeds=seeds)


def parked_save_loses_its_seed(plant):
    """A capsule of a parked branch is that of the trunk, whatever seed waits for the branch."""
    @plant.around(Sessions, '_reseeded')
    def reseeded(whole, self, frozen, seed):
        return self._lineage.pool.hold(frozen), 0


def rollback_moves_the_position_alone(plant):
    """A rollback moves the position and nothing else."""
    @plant.around(Session, 'rollback')
    def rollback(whole, self, target, max_replay=None, control=None, aside=None):
        self._host, self._sampled = self._host_at(self.host, target), 0
        self._plan.arena.set_position(target)
        return 0, 0


def rollback_keeps_the_counter(plant):
    """A rollback leaves the counter of the sampler where it was."""
    @plant.around(Session, 'rollback')
    def rollback(whole, self, *rest, **named):
        counter = plant.engine.arena['sampler.counter'].clone()
        answer = whole(self, *rest, **named)
        plant.engine.arena['sampler.counter'].copy_(counter)
        return answer


def replayed_counter_one_too_low(plant):
    """A replay leaves the counter of the sampler at its last token instead of behind it."""
    @plant.around(sampling, 'write')
    def write(whole, arena, sampling, counter):
        return whole(arena, sampling, max(0, counter - 1))


def impossible_rollback_taken(plant):
    """A rollback beyond the start is taken for one to the start."""
    @plant.around(Engine, 'rollback')
    def rollback(whole, self, *rest, **named):
        try:
            return whole(self, *rest, **named)
        except FlashrtError:
            return whole(self, to='position', value=0)


# -- files and other processes --------------------------------------------------------------------


def file_lacks_recurrent(plant):
    """A file is written with zeros where the recurrent state was; its digests hold."""
    @plant.around(codec, 'write')
    def write(whole, image, path, manifest, *rest, **named):
        image.fixed = image.fixed.clone()
        for buffer in manifest.fixed:
            if buffer.role is Role.RECURRENT:
                start = manifest.offsets[buffer.name]
                image.fixed[start:start + buffer.nbytes] = 0
        return whole(image, path, manifest, *rest, **named)


def file_lacks_its_schedule(plant):
    """A file does not say how its rows came to be but one by one; its bytes are right."""
    @plant.around(codec, 'write')
    def write(whole, image, *rest, **named):
        folds = Schedule((Run(1, image.header.position),) if image.header.position else ())
        image.header = replace(image.header, host=HostState(folds).to_json())
        return whole(image, *rest, **named)


def child_cannot_start(plant):
    """The new process ends before it restored anything."""
    @plant.around(process, 'child_environment')
    def environment(whole):
        return {**whole(), 'PYTHONHOME': '/nonexistent'}


class Agreeable(str):
    """A digest that every digest equals."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = None


def damage_overlooked(plant):
    """A reader takes a file for good whose digests do not hold."""
    @plant.around(codec, 'read_payload')
    def read(whole, fd, regions, digests, *rest, **named):
        return whole(fd, regions, defaultdict(Agreeable), *rest, **named)


def touches_before_it_checks(plant):
    """A restore clears the live state before it knows that the file is good."""
    @plant.around(Engine, 'restore')
    def restore(whole, self, *rest, **named):
        self.arena['logits'].zero_()
        return whole(self, *rest, **named)


# -- aborts ---------------------------------------------------------------------------------------


def nothing_kept_for_an_abort(plant):
    """A verb that fails in the middle does not put the fixed block back."""
    @plant.around(Lineage, 'guard')
    def guard(whole, self, block=None):
        return nullcontext()


def canceled_answer_stays(plant):
    """A cancelled answer that was to be taken back is not."""
    @plant.around(Answering, 'answer')
    def answer(whole, self, request, control, listeners):
        return whole(self, replace(request, rollback_on_cancel=False), control, listeners)


def failed_rollback_stays_half_done(plant):
    """A rollback that fails in its replay does not go forward again."""
    replaying = []

    @plant.around(Session, '_replay')
    def replay(whole, self, *rest, **named):
        replaying.append(True)
        try:
            return whole(self, *rest, **named)
        finally:
            replaying.clear()

    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        return 0 if replaying else whole(self, *rest, **named)


def cancel_unheard(plant):
    """An append does not look at its control."""
    @plant.around(Session, 'append')
    def append(whole, self, ids, turn, role=None, control=None, aside=None):
        return whole(self, ids, turn, role, None, aside)


def reseeded_block_put_back(plant):
    """An abort puts back the block of the capsule, without the seed that was asked for."""
    @plant.around(Session, 'changed')
    def changed(whole, self):
        return None


# -- leaks ----------------------------------------------------------------------------------------


def pages_leak(plant):
    """A save takes one reference too many."""
    @plant.around(Lineage, 'save')
    def save(whole, self):
        frozen, copied = whole(self)
        self.pool.hold_pages(frozen.pages)
        return frozen, copied


def memory_leaks(plant):
    """Every restore keeps a little memory for ever."""
    kept = []

    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        kept.append(b'\1' * (1 << 20))
        return whole(self, *rest, **named)


def tensors_leak(plant):
    """Every save keeps a tensor for ever."""
    kept = []

    @plant.around(Lineage, 'save')
    def save(whole, self):
        kept.append(torch.zeros(1))
        return whole(self)


def objects_leak(plant):
    """Every restore keeps a few small objects for ever."""
    kept = []

    @plant.around(Lineage, 'restore')
    def restore(whole, self, frozen, *rest, **named):
        kept.extend((frozen.position, index, object()) for index in range(4))
        return whole(self, frozen, *rest, **named)


def address_moves(plant):
    """A restore puts a buffer into new memory."""
    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        copied = whole(self, *rest, **named)
        self.arena._views['logits'] = self.arena['logits'].clone()
        return copied
