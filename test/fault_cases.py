"""
Faults that break one mechanism each: what the checks of `verify` are held against.

Each takes a :class:`planting.Plant` and puts something else in the place of a function of the
package for a test. FAULTS says which check has to notice which, and by what.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from fault_cases_verbs import (
    a_seed_marks_the_trunk,
    address_moves,
    aligned_is_not,
    cancel_unheard,
    canceled_answer_stays,
    child_cannot_start,
    damage_overlooked,
    failed_rollback_stays_half_done,
    file_lacks_its_schedule,
    file_lacks_recurrent,
    fork_of_a_session_takes_its_parent,
    forks_share_a_block,
    forks_share_a_seed,
    impossible_rollback_taken,
    memory_leaks,
    nothing_kept_for_an_abort,
    objects_leak,
    pages_leak,
    parked_save_loses_its_seed,
    rebuilt_off_the_grid,
    replayed_counter_one_too_low,
    reseeded_block_put_back,
    rollback_keeps_the_counter,
    rollback_moves_the_position_alone,
    tail_forgets,
    tensors_leak,
    touches_before_it_checks,
)
from planting import Fault
import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena, Role, Rows
from flashrt_ros.capsule.lineage import Lineage
from flashrt_ros.capsule.pool import Frozen, PAGE
from flashrt_ros.engine import Engine
from flashrt_ros.session import Session


def named(name, plant):
    """Return a plant under a name of its own, for the ids of tests."""
    plant.__name__ = name
    return plant


# -- restores ---------------------------------------------------------------------------------


def restore_without(*roles, only=''):
    """Return a fault: a restore leaves out the buffers of some roles, or one of them only."""
    def fault(plant):
        @plant.around(Lineage, 'restore')
        def restore(whole, self, *rest, **named):
            kept = {b.name: self.arena[b.name].clone() for b in self.arena.manifest.buffers
                    if b.role in roles and b.name.startswith(only)}
            copied = whole(self, *rest, **named)
            for name, content in kept.items():
                self.arena[name].copy_(content)
            return copied
    words = [only.rstrip('.').replace('.', '_')] * bool(only) + [role.value for role in roles]
    return named('restore_without_' + '_'.join(words), fault)


def one_row_less(plant):
    """Copies of rows forget the last one."""
    @plant.around(Rows, 'copy_from')
    def copy(whole, self, source, source_row, row, count):
        return whole(self, source, source_row, row, count - 1)


def rows_shifted(plant):
    """A restore puts every row one too high."""
    @plant.around(Rows, 'copy_from')
    def copy(whole, self, source, source_row, row, count):
        up = self is plant.engine.arena.rows and row + count < self.capacity
        return whole(self, source, source_row, row + up, count)


def one_field_not_restored(plant):
    """A restore forgets the last field of the rows, which is V of the last attention layer."""
    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        last = self.arena.rows.planes[-1][-1]
        kept = last.clone()
        copied = whole(self, *rest, **named)
        last.copy_(kept)
        return copied


def counter_not_restored(plant):
    """A restore leaves the counter of the sampler where it was."""
    @plant.around(Lineage, 'restore')
    def restore(whole, self, *rest, **named):
        counter = plant.engine.arena['sampler.counter'].clone()
        copied = whole(self, *rest, **named)
        if self.arena is plant.engine.arena:
            self.arena['sampler.counter'].copy_(counter)
        return copied


def counter_one_too_high(plant):
    """A restore takes the drawn token for one that is still to be counted."""
    @plant.around(Lineage, 'restore')
    def restore(whole, self, frozen, *rest, **named):
        copied = whole(self, frozen, *rest, **named)
        if frozen.position:
            self.arena['sampler.counter'].add_(1)
        return copied


def logits_of_a_relative(plant):
    """A restore takes the logits of the capsule that was saved last, if it shares a page."""
    saved = []

    @plant.around(Lineage, 'save')
    def save(whole, self):
        frozen, copied = whole(self)
        logits = self.arena['logits'].clone()
        saved.append((frozen.pages[:1].tolist(), logits))
        return frozen, copied

    @plant.around(Lineage, 'restore')
    def restore(whole, self, frozen, *rest, **named):
        copied = whole(self, frozen, *rest, **named)
        pages, logits = saved[-1] if saved else ([], None)
        if pages and pages == frozen.pages[:1].tolist():
            self.arena['logits'].copy_(logits)
        return copied


def host_part_not_restored(plant):
    """A restore leaves the fold schedule and the half-read character of the text before it."""
    @plant.around(Session, 'become')
    def become(whole, self, host, *rest, **named):
        kept = self.host if host.schedule.tokens else host
        return whole(self, kept, *rest, **named)


def half_a_character_lost(plant):
    """A capsule does not keep the bytes that are not yet a whole character."""
    @plant.around(Session, 'become')
    def become(whole, self, host, *rest, **named):
        return whole(self, replace(host, detokenizer=None), *rest, **named)


# -- the clean watermark, rows, pages and blocks --------------------------------------------------


def writes_unannounced(plant):
    """No write lowers the clean watermark."""
    @plant.around(Arena, 'will_write')
    def will_write(whole, self, row):
        return None


def folds_unannounced(plant):
    """The plan does not say which rows it writes; others do."""
    @plant.around(type(plant.engine.plan), '_fold')
    def fold(whole, self, *rest, **named):
        clean = self.arena.clean
        whole(self, *rest, **named)
        self.arena.clean = clean


def clean_only_below_position(plant):
    """The naive rule: rows below where we are cannot have changed."""
    @plant.around(Lineage, 'save')
    def save(whole, self):
        self.arena.clean = max(self.arena.clean, min(self.arena.position, len(self.trail) * PAGE))
        return whole(self)


def rollback_leaves_rows_clean(plant):
    """A rollback trusts the rows that its replay wrote: ``clean`` stays where it was."""
    @plant.around(Session, 'rollback')
    def rollback(whole, self, *rest, **named):
        self._save()[0]  # as the replay does, so that all rows are clean once
        clean = plant.engine.arena.clean
        answer = whole(self, *rest, **named)
        plant.engine.arena.clean = min(clean, plant.engine.arena.position)
        return answer


def trail_without_references(plant):
    """The live trail does not hold its pages, so their ids are reused under it."""
    @plant.around(Lineage, '_follow')
    def follow(whole, self, pages, position):
        self.trail = pages
        self.arena.clean = position


def freed_pages_shared(plant):
    """As above, in a pool that does not notice who holds what is free."""
    trail_without_references(plant)

    @plant.around(type(plant.engine.lineage.pool.page_ids), 'hold')
    def hold(whole, self, places):
        self.references[places] += 1  # and they stay in the list of the free

    @plant.around(type(plant.engine.lineage.pool.page_ids), 'release')
    def release(whole, self, places):
        free = self.references[places] < 1
        if isinstance(places, int):
            return None if free else whole(self, places)
        return whole(self, places[~free])


def page_written_in_place(plant):
    """A save writes into a page that an older capsule holds."""
    @plant.around(Lineage, 'save')
    def save(whole, self):
        if len(self.trail):
            self.pool.rows.planes[0][:, self.trail[-1] * PAGE] ^= 1
        return whole(self)


def last_page_grown_in_place(plant):
    """A save goes on in the partly filled last page of its parent instead of a copy of it."""
    @plant.around(Lineage, 'save')
    def save(whole, self):
        trail, clean = self.trail, min(self.arena.clean, self.arena.position)
        frozen, copied = whole(self)
        index = clean // PAGE
        if clean % PAGE and index < len(trail) and frozen.pages[index] != trail[index]:
            first, count = index * PAGE, min(PAGE, frozen.position - index * PAGE)
            pages = frozen.pages.copy()
            pages[index] = trail[index]
            self.pool.hold_pages(pages)
            self.pool.rows.copy_from(self.arena.rows, first, int(pages[index]) * PAGE, count)
            self.pool.release_pages(frozen.pages)
            frozen = Frozen(frozen.position, frozen.block, pages)
            self._follow(pages, frozen.position)
        return frozen, copied


def place_keeps_its_uid(plant):
    """A page that is taken again has the uid of what was there: it is taken for that."""
    @plant.around(type(plant.engine.lineage.pool.page_ids), 'take')
    def take(whole, self, wanted):
        before = self.uids.copy()
        places = whole(self, wanted)
        used = places[before[places] > 0]
        self.uids[used] = before[used]
        return places


def block_reused(plant):
    """A save puts its block where that of an older capsule is."""
    older = []

    @plant.around(Lineage, 'save')
    def save(whole, self):
        frozen, copied = whole(self)
        if older:
            self.pool.blocks[older[0]].copy_(self.arena.fixed)
        older.append(frozen.block)
        return frozen, copied


def kept_boundary_changes(plant):
    """The block that a session keeps for rollbacks is that of the capsule, and is written."""
    @plant.around(Lineage, 'put_back')
    def put_back(whole, self, block, position=None):
        copied = whole(self, block, position)
        self.pool.blocks[block][-1] ^= 1
        return copied


# -- the sampler ----------------------------------------------------------------------------------


def seed_ignored(plant):
    """The sampler draws the same numbers whatever the seed."""
    @plant.around(sampling, 'uniform')
    def uniform(whole, seed, counter):
        return whole(0, counter)


def hidden_generator(plant):
    """The sampler draws from a generator that is no part of the state."""
    generator = torch.Generator().manual_seed(3)

    @plant.around(sampling, 'uniform')
    def uniform(whole, seed, counter):
        return torch.rand(1, generator=generator).item()


# -- the forward pass -----------------------------------------------------------------------------


def around_fold(before=None, after=None):
    """Return a fault in the forward pass itself."""
    def fault(plant):
        bound, arena = plant.engine.plan._bound, plant.engine.arena

        @plant.around(bound, 'fold')
        def fold(whole, ids, position):
            if before is not None:
                before(arena, position)
            logits = whole(ids, position)
            return logits if after is None else after(arena, logits, position + ids.numel())
    return named((before or after).__name__, fault)


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


def changes_a_weight(plant):
    """A replay writes into the weights."""
    _, weight = next(iter(plant.engine.model.weights()))

    def touch(arena, position):
        weight.view(-1)[0].mul_(1.5)
    around_fold(touch)(plant)


def writes_a_free_page(plant):
    """A replay writes into the pool, where no capsule is yet."""
    page = plant.engine.lineage.pool.rows.planes[0]

    def touch(arena, position):
        page[0, -1] += 1
    around_fold(touch)(plant)


def buffer_not_looked_up(plant):
    """A plan takes a manifest that lacks a buffer."""
    @plant.around(type(plant.engine.plan), '__init__')
    def init(whole, self, *rest, **named):
        return None


def reads_a_dead_row(arena, logits, end):
    rows = next(b.name for b in arena.manifest.rows if b.dtype.is_floating_point)
    return logits + arena[rows][min(end, arena.capacity - 1)].float().sum()


def reads_scratch(arena, logits, end):
    return logits + arena.scratch.float().sum()


def forgets_before_it_folds(role):
    """Return a fault: the model does not use a class of its state, so it carries nothing."""
    def clear(arena, position):
        for buffer in arena.manifest.buffers:
            if buffer.role is role:
                arena[buffer.name].zero_()
    return named(f'forgets_{role.value}_before_it_folds', around_fold(clear))


def position_on_the_host(plant):
    """The plan counts rows by itself and asks the state but once, so a restore moves nothing."""
    counted = []

    @plant.around(plant.engine.plan._bound, 'fold')
    def fold(whole, ids, position):
        at = counted[0] if counted and ids.numel() == 1 else position
        at = min(at, plant.engine.arena.capacity - ids.numel())
        counted[:] = [at + ids.numel()]
        return whole(ids, at)


def position_baked_in(plant):
    """The first step's position is in every later step: the rows behind it stay unwritten."""
    baked = []

    @plant.around(plant.engine.plan._bound, 'fold')
    def fold(whole, ids, position):
        if ids.numel() > 1:
            return whole(ids, position)
        baked[1:] = []
        baked.append(position)
        return whole(ids, baked[0])


def saved_answer_forgets_its_tokens(plant):
    """A save in the middle of an answer takes the host part from before it."""
    @plant.around(Engine, 'save')
    def save(whole, self, *rest, **named):
        session = self.session()
        sampled, session._sampled = session._sampled, 0
        try:
            return whole(self, *rest, **named)
        finally:
            session._sampled = sampled


FORGETFUL = r'^0(\.0)? max abs logit difference'  # nothing depends on what was left out

FAULTS = [
    Fault('byte_exact', restore_without(Role.RECURRENT)),
    Fault('byte_exact', restore_without(Role.CONV)),
    Fault('byte_exact', restore_without(Role.BOUNDARY)),
    Fault('byte_exact', restore_without(Role.CONV, only='layers.2.')),
    Fault('byte_exact', restore_without(Role.BOUNDARY, only='position')),
    Fault('byte_exact', one_row_less), Fault('byte_exact', rows_shifted),
    Fault('byte_exact', one_field_not_restored), Fault('byte_exact', writes_unannounced),
    Fault('byte_exact', counter_one_too_high), Fault('byte_exact', position_on_the_host),
    Fault('byte_exact', host_part_not_restored, '; 0 of 2 host parts'),
    Fault('byte_exact', half_a_character_lost, '; 0 of 2 host parts'),
    Fault('token_exact', writes_unannounced), Fault('token_exact', folds_unannounced),
    Fault('token_exact', restore_without(Role.CONV)),
    Fault('token_exact', restore_without(Role.CONV, only='layers.2.')),
    Fault('token_exact', one_row_less), Fault('token_exact', one_field_not_restored),
    Fault('token_exact', logits_of_a_relative),
    Fault('sampled_exact', counter_not_restored), Fault('sampled_exact', counter_one_too_high),
    Fault('sampled_exact', seed_ignored, '; 0 of 6 other seeds gave other tokens'),
    Fault('sampled_exact', hidden_generator),
    Fault('sampled_exact', saved_answer_forgets_its_tokens, ' has 1 differences from an answer'),
    Fault('cold_exact_aligned', aligned_is_not), Fault('cold_exact_aligned', tail_forgets),
    Fault('cold_exact_aligned', rebuilt_off_the_grid),
    Fault('closed_manifest', around_fold(writes_outside)),
    Fault('closed_manifest', around_fold(writes_outside_behind_torch)),
    Fault('closed_manifest', around_fold(rebinds_a_cache)),
    Fault('closed_manifest', around_fold(writes_with_out)),
    Fault('closed_manifest', changes_a_weight), Fault('closed_manifest', writes_a_free_page),
    Fault('closed_manifest', buffer_not_looked_up, r'; 0 of \d+ manifests that lack one buffer'),
    Fault('dead_rows', around_fold(after=reads_a_dead_row)),
    Fault('dead_rows', around_fold(after=reads_scratch)),
    Fault('dead_rows', position_baked_in),
    Fault('immutable', page_written_in_place), Fault('immutable', block_reused),
    Fault('immutable', last_page_grown_in_place), Fault('immutable', kept_boundary_changes),
    Fault('fork_divergent', forks_share_a_seed), Fault('fork_divergent', forks_share_a_block),
    Fault('fork_divergent', a_seed_marks_the_trunk, '; [1-9][0-9]* bytes of the trunk changed'),
    Fault('fork_divergent', fork_of_a_session_takes_its_parent, 'went on otherwise'),
    Fault('fork_divergent', parked_save_loses_its_seed, 'parked branch gave NOT the same'),
    Fault('fork_divergent', restore_without(Role.RECURRENT)),
    Fault('fork_divergent', page_written_in_place),
    Fault('rollback', rollback_moves_the_position_alone),
    Fault('rollback', rollback_keeps_the_counter), Fault('rollback', rollback_leaves_rows_clean),
    Fault('rollback', replayed_counter_one_too_low),
    Fault('rollback', folds_unannounced), Fault('rollback', writes_unannounced),
    Fault('rollback', impossible_rollback_taken, '; [0-2] of 3 impossible rollbacks were refused'),
    Fault('lineage', writes_unannounced), Fault('lineage', folds_unannounced),
    Fault('lineage', trail_without_references, ended='AssertionError in hold: .* after they were '
          'freed'),
    Fault('lineage', freed_pages_shared), Fault('lineage', clean_only_below_position),
    Fault('lineage', last_page_grown_in_place), Fault('lineage', logits_of_a_relative),
    Fault('lineage', place_keeps_its_uid),
    Fault('new_process_restore', file_lacks_recurrent),
    Fault('new_process_restore', file_lacks_its_schedule),
    Fault('new_process_restore', child_cannot_start,
          ended='^the new process ended with exit code 1 '),
    Fault('failed_restore_untouched', damage_overlooked, 'Restored in spite of: .* payload'),
    Fault('failed_restore_untouched', touches_before_it_checks),
    Fault('abort_untouched', nothing_kept_for_an_abort),
    Fault('abort_untouched', cancel_unheard, ' and 1 cancels '),  # that of an answer
    Fault('abort_untouched', reseeded_block_put_back),
    Fault('abort_untouched', failed_rollback_stays_half_done),
    Fault('abort_untouched', canceled_answer_stays),
    Fault('ablation_kv_only', restore_without(Role.RECURRENT, Role.CONV, Role.BOUNDARY)),
    Fault('ablation_no_recurrent', restore_without(Role.RECURRENT)),
    Fault('ablation_no_recurrent', forgets_before_it_folds(Role.RECURRENT), FORGETFUL),
    Fault('ablation_no_conv', restore_without(Role.CONV)),
    Fault('ablation_no_conv', restore_without(Role.CONV, only='layers.2.')),
    Fault('ablation_no_conv', forgets_before_it_folds(Role.CONV), FORGETFUL),
    Fault('ablation_no_boundary', restore_without(Role.BOUNDARY)),
    Fault('steady_memory', pages_leak, r'; 0 blocks and [1-9]\d* pages were not given back'),
    Fault('steady_memory', memory_leaks, r'^\d{8,} bytes of growth'),
    Fault('steady_memory', tensors_leak, r'; [1-9]\d* tensors and'),
    Fault('steady_memory', objects_leak, r' 0 tensors and [1-9]\d* small objects more'),
    Fault('steady_memory', address_moves, r'; [1-9]\d* of \d+ addresses moved'),
    Fault('non_lm_program', restore_without(Role.RECURRENT)),
    Fault('non_lm_program', one_row_less), Fault('non_lm_program', one_field_not_restored),
    Fault('non_lm_program', writes_unannounced),
]
