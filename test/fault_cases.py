"""
Faults that break one mechanism each: what the checks of `verify` are held against.

Each takes monkeypatch and the engine, and replaces one function of the package for a test. FAULTS
says which check has to notice which.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena, Role, Rows
from flashrt_ros.capsule import codec
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Pool
from flashrt_ros.capsule.tiers import DiskTier
from flashrt_ros.engine import Engine
from flashrt_ros.errors import Corrupt, FlashrtError
from flashrt_ros.session import Session


def restore_without(*roles):
    """Return a fault: a restore leaves out the buffers of some roles."""
    def plant(monkeypatch, engine):
        whole = Lineage.restore

        def restore(self, frozen):
            kept = {b.name: self.arena[b.name].clone() for b in self.arena.manifest.buffers
                    if b.role in roles}
            copied = whole(self, frozen)
            for name, content in kept.items():
                self.arena[name].copy_(content)
            return copied
        monkeypatch.setattr(Lineage, 'restore', restore)
    return plant


def one_row_less(monkeypatch, engine):
    """Copies of rows forget the last one."""
    whole = Rows.copy_from
    monkeypatch.setattr(Rows, 'copy_from', lambda self, source, a, b, count: whole(
        self, source, a, b, count - 1))


def rows_shifted(monkeypatch, engine):
    """A restore puts every row one too high."""
    whole = Rows.copy_from

    def copy(self, source, a, b, count):
        return whole(self, source, a, b + (self.capacity == 512 and b + count < 512), count)
    monkeypatch.setattr(Rows, 'copy_from', copy)


def writes_unannounced(monkeypatch, engine):
    """Writes do not lower the clean watermark."""
    monkeypatch.setattr(Arena, 'will_write', lambda self, row: None)


def clean_only_below_position(monkeypatch, engine):
    """The naive rule: rows below where we are cannot have changed."""
    whole = Lineage.save

    def save(self):
        self.arena.clean = max(self.arena.clean, min(self.arena.position, len(self.trail) * 64))
        return whole(self)
    monkeypatch.setattr(Lineage, 'save', save)


def counter_not_restored(monkeypatch, engine):
    """A restore leaves the counter of the sampler where it was."""
    whole = Lineage.restore

    def restore(self, frozen):
        counter = engine.arena['sampler.counter'].clone()
        copied = whole(self, frozen)
        if self.arena is engine.arena:
            engine.arena['sampler.counter'].copy_(counter)
        return copied
    monkeypatch.setattr(Lineage, 'restore', restore)


def seed_ignored(monkeypatch, engine):
    """The sampler draws the same numbers whatever the seed."""
    whole = sampling.uniform
    monkeypatch.setattr(sampling, 'uniform', lambda seed, counter: whole(0, counter))


def hidden_generator(monkeypatch, engine):
    """The sampler draws from a generator that is no part of the state."""
    generator = torch.Generator().manual_seed(3)
    monkeypatch.setattr(sampling, 'uniform', lambda seed, counter: torch.rand(
        1, generator=generator).item())


def aligned_is_not(monkeypatch, engine):
    """An aligned save is an ordinary one."""
    monkeypatch.setattr(Engine, '_freeze_aligned', lambda self, target: (
        (lambda frozen, copied: (frozen, target.host, copied))(*self._freeze(target))))


def tail_forgets(monkeypatch, engine):
    """The unfolded tail of an aligned save lacks its first id."""
    whole = Engine._freeze_aligned

    def freeze(self, target):
        frozen, host, copied = whole(self, target)
        return frozen, replace(host, tail=host.tail[1:]), copied
    monkeypatch.setattr(Engine, '_freeze_aligned', freeze)


def around_fold(before=lambda arena, position: None, after=lambda arena, logits, end: logits):
    """Return a fault in the forward pass itself."""
    def plant(monkeypatch, engine):
        bound, arena = engine.plan._bound, engine.arena

        def fold(ids, position):
            before(arena, position)
            return after(arena, bound.fold(ids, position), position + ids.numel())
        monkeypatch.setattr(engine.plan, '_bound', SimpleNamespace(fold=fold))
    return plant


OUTSIDE = torch.zeros(8)
HOLDER = SimpleNamespace(cache=None)


def writes_outside(arena, position):
    OUTSIDE.add_(1)


def writes_outside_behind_torch(arena, position):
    OUTSIDE.numpy()[0] += 1


def rebinds_a_cache(arena, position):
    HOLDER.cache = torch.full((4,), position)


def writes_with_out(arena, position):
    torch.add(OUTSIDE, 1, out=OUTSIDE)


def changes_a_weight(monkeypatch, engine):
    """A replay writes into the weights."""
    name, weight = next(iter(engine.model.weights()))

    def touch(arena, position):
        weight.view(-1)[0].mul_(1.5)
    around_fold(touch)(monkeypatch, engine)


def buffer_not_looked_up(monkeypatch, engine):
    """A plan takes a manifest that lacks a buffer."""
    monkeypatch.setattr(type(engine.plan), '__init__', lambda self, *rest: None)


def reads_a_dead_row(arena, logits, end):
    rows = next(b.name for b in arena.manifest.rows if b.dtype.is_floating_point)
    return logits + arena[rows][min(end, arena.capacity - 1)].float().sum()


def reads_scratch(arena, logits, end):
    return logits + arena.scratch.float().sum()


def page_written_in_place(monkeypatch, engine):
    """A save writes into a page that an older capsule holds."""
    whole = Lineage.save

    def save(self):
        if len(self.trail):
            self.pool.rows.planes[0][:, self.trail[-1] * 64] ^= 1
        return whole(self)
    monkeypatch.setattr(Lineage, 'save', save)


def block_reused(monkeypatch, engine):
    """A dropped reference frees a block that another capsule still holds."""
    whole = Pool.take

    def take(self, pages, block=True):
        found, taken = whole(self, pages, block)
        if block and found > 3:
            self.blocks[3] ^= 1
        return found, taken
    monkeypatch.setattr(Pool, 'take', take)


def forks_share_a_seed(monkeypatch, engine):
    """A fork ignores the seeds it is given."""
    whole = Engine.fork
    monkeypatch.setattr(Engine, 'fork', lambda self, capsule='', *, sessions, seeds=(), **rest:
                        whole(self, capsule, sessions=sessions, **rest))


def rollback_keeps_the_counter(monkeypatch, engine):
    """A rollback moves the position and nothing else."""
    def rollback(self, target, max_replay=None, control=None):
        self._host = self._host_at(self.host, target)
        self._plan.arena.set_position(target)
        return 0, 0
    monkeypatch.setattr(Session, 'rollback', rollback)


def impossible_rollback_taken(monkeypatch, engine):
    """A rollback beyond the start is taken for one to the start."""
    whole = Engine.rollback

    def rollback(self, session='default', *, to, value, **rest):
        try:
            return whole(self, session, to=to, value=value, **rest)
        except FlashrtError:
            return whole(self, session, to='position', value=0)
    monkeypatch.setattr(Engine, 'rollback', rollback)


def trail_without_references(monkeypatch, engine):
    """The live trail does not hold its pages, so their ids are reused under it."""
    def follow(self, pages, position):
        self.trail = pages
        self.arena.clean = position
    monkeypatch.setattr(Lineage, '_follow', follow)


def file_lacks_recurrent(monkeypatch, engine):
    """A file is written with zeros where the recurrent state was; its digests hold."""
    whole = codec.write

    def write(image, path, manifest, *, overwrite):
        image.fixed = image.fixed.clone()
        for buffer in manifest.fixed:
            if buffer.role is Role.RECURRENT:
                start = manifest.offsets[buffer.name]
                image.fixed[start:start + buffer.nbytes] = 0
        return whole(image, path, manifest, overwrite=overwrite)
    monkeypatch.setattr(codec, 'write', write)


def child_cannot_start(monkeypatch, engine):
    """The new process ends before it restored anything."""
    monkeypatch.setenv('PYTHONHOME', '/nonexistent')


def damage_overlooked(monkeypatch, engine):
    """A reader takes a file for good whose digests do not hold."""
    read, write, written = DiskTier.get, DiskTier.put, []

    def put(self, image, manifest, overwrite=False):
        written.append(replace(image, fixed=image.fixed.clone()))
        return write(self, image, manifest, overwrite)

    def get(self, *rest, **named):
        try:
            return read(self, *rest, **named)
        except Corrupt as error:
            if 'digest' not in str(error):
                raise
            return written[-1]
    monkeypatch.setattr(DiskTier, 'put', put)
    monkeypatch.setattr(DiskTier, 'get', get)


def touches_before_it_checks(monkeypatch, engine):
    """A restore clears the live state before it knows that the file is good."""
    whole = Engine.restore

    def restore(self, session='default', capsule='', **rest):
        self.arena['logits'].zero_()
        return whole(self, session, capsule, **rest)
    monkeypatch.setattr(Engine, 'restore', restore)


def nothing_kept_for_an_abort(monkeypatch, engine):
    """A verb that fails in the middle does not put the fixed block back."""
    monkeypatch.setattr(Lineage, 'guard', lambda self: nullcontext())


def cancel_unheard(monkeypatch, engine):
    """An append does not look at its control."""
    whole = Session.append
    monkeypatch.setattr(Session, 'append', lambda self, *rest: whole(self, *rest[:-1], None))


def forgets_before_it_folds(role):
    """Return a fault: the model does not use a class of its state, so it carries nothing."""
    def clear(arena, position):
        for buffer in arena.manifest.buffers:
            if buffer.role is role:
                arena[buffer.name].zero_()
    return around_fold(clear)


def pages_leak(monkeypatch, engine):
    """A save takes one reference too many."""
    whole = Lineage.save

    def save(self):
        frozen, copied = whole(self)
        self.pool.hold_pages(frozen.pages)
        return frozen, copied
    monkeypatch.setattr(Lineage, 'save', save)


def memory_leaks(monkeypatch, engine):
    """Every restore keeps a little memory for ever."""
    whole, kept = Lineage.restore, []

    def restore(self, frozen):
        kept.append(b'\1' * (1 << 20))
        return whole(self, frozen)
    monkeypatch.setattr(Lineage, 'restore', restore)


def tensors_leak(monkeypatch, engine):
    """Every save keeps a tensor for ever."""
    whole, kept = Lineage.save, []

    def save(self):
        kept.append(torch.zeros(1))
        return whole(self)
    monkeypatch.setattr(Lineage, 'save', save)


def address_moves(monkeypatch, engine):
    """A restore puts a buffer into new memory."""
    whole = Lineage.restore

    def restore(self, frozen):
        copied = whole(self, frozen)
        self.arena._views['logits'] = self.arena['logits'].clone()
        return copied
    monkeypatch.setattr(Lineage, 'restore', restore)


FAULTS = [
    ('byte_exact', restore_without(Role.RECURRENT)), ('byte_exact', restore_without(Role.CONV)),
    ('byte_exact', restore_without(Role.BOUNDARY)), ('byte_exact', one_row_less),
    ('byte_exact', rows_shifted), ('byte_exact', writes_unannounced),
    ('token_exact', writes_unannounced), ('token_exact', restore_without(Role.CONV)),
    ('token_exact', one_row_less),
    ('sampled_exact', counter_not_restored), ('sampled_exact', seed_ignored),
    ('sampled_exact', hidden_generator),
    ('cold_exact_aligned', aligned_is_not), ('cold_exact_aligned', tail_forgets),
    ('closed_manifest', around_fold(writes_outside)),
    ('closed_manifest', around_fold(writes_outside_behind_torch)),
    ('closed_manifest', around_fold(rebinds_a_cache)),
    ('closed_manifest', around_fold(writes_with_out)), ('closed_manifest', changes_a_weight),
    ('closed_manifest', buffer_not_looked_up),
    ('dead_rows', around_fold(after=reads_a_dead_row)),
    ('dead_rows', around_fold(after=reads_scratch)),
    ('immutable', page_written_in_place), ('immutable', block_reused),
    ('fork_divergent', forks_share_a_seed), ('fork_divergent', restore_without(Role.RECURRENT)),
    ('fork_divergent', page_written_in_place),
    ('rollback', rollback_keeps_the_counter), ('rollback', writes_unannounced),
    ('rollback', impossible_rollback_taken),
    ('lineage', writes_unannounced), ('lineage', trail_without_references),
    ('lineage', clean_only_below_position),
    ('new_process_restore', file_lacks_recurrent), ('new_process_restore', child_cannot_start),
    ('failed_restore_untouched', damage_overlooked),
    ('failed_restore_untouched', touches_before_it_checks),
    ('abort_untouched', nothing_kept_for_an_abort), ('abort_untouched', cancel_unheard),
    ('ablation_kv_only', restore_without(Role.RECURRENT, Role.CONV, Role.BOUNDARY)),
    ('ablation_no_recurrent', restore_without(Role.RECURRENT)),
    ('ablation_no_recurrent', forgets_before_it_folds(Role.RECURRENT)),
    ('ablation_no_conv', restore_without(Role.CONV)),
    ('ablation_no_conv', forgets_before_it_folds(Role.CONV)),
    ('ablation_no_boundary', restore_without(Role.BOUNDARY)),
    ('steady_memory', pages_leak), ('steady_memory', memory_leaks),
    ('steady_memory', tensors_leak), ('steady_memory', address_moves),
    ('non_lm_program', restore_without(Role.RECURRENT)), ('non_lm_program', one_row_less),
    ('non_lm_program', writes_unannounced),
]


def labels(faults):
    """Return the ids of the tests of a list of faults."""
    return [f'{index:02}-{name}-{getattr(plant, "__qualname__", plant).split(".")[0]}'
            for index, (name, plant) in enumerate(faults)]
