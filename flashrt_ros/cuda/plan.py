"""
The plan of a CUDA device: a few captured graphs over one arena.

=========== ========================================= ==========================================
graph       does                                      used for
=========== ========================================= ==========================================
``step``    sample, hand out, fold, count             every generated token, at every position
``rest``    what a step does behind the sampling      a first token, see :meth:`step`
``fold``    fold one known token                      appends of one token, replays
``few``     fold up to 4 known tokens in one pass     short appends, replays
``verify``  fold a draft beside the state, sample     steps that a draft foresees
            behind each of its tokens
buckets     fold up to 32, 128, 512 known tokens      everything longer
=========== ========================================= ==========================================

The first five give a token the same bits. Position, live count, sampler settings and counter are
device scalars; nothing is baked in. All is allocated and captured at construction and stays at its
address. The host never waits for a fold: it learns a token from a mailbox in pinned memory while
the device folds it, and everything else is ordered by the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from flashrt_ros.arena import Arena
from flashrt_ros.cuda import decode, prefill
from flashrt_ros.cuda.decode import Decode, Ladder, Weights
from flashrt_ros.cuda.driver import Launch, Toolbox
from flashrt_ros.cuda.front import COUNTER, Front
from flashrt_ros.cuda.mail import Mail
from flashrt_ros.cuda.prefill import Prefill, Room
from flashrt_ros.cuda.settings import Settings
from flashrt_ros.errors import DeviceFault, InvalidArgument
from flashrt_ros.plan import GRID, manifest_of

BUCKETS = (32, 128)  # and the grid
SMALL = 16 << 20  # bytes: norms in the form that kernels take, mail, the sampler's work space


class CudaGraphPlan:
    """
    Same verbs as :class:`flashrt_ros.plan.EagerPlan`; see there.

    :param eager: launch the same kernels one after another instead of replaying graphs (tests).
    :raises DeviceFault: where kernels cannot be compiled or loaded.
    """

    def __init__(self, model, arena: Arena, grid: int = GRID, eager: bool = False) -> None:
        decode.check_sizes(model)
        self.arena, self.grid, self.eager = arena, grid, eager
        self.aside: Callable[[], None] | None = None  # called while a token is waited for
        device = arena.device
        self._tools = tools = Toolbox(device, model.dtype)
        self.block = decode.block_size(model, tools.shared)  # tokens that get a step's bits at once
        self._weights = Weights(model, arena.capacity)
        self.mail = mail = Mail(device, grid, decode.BLOCK)
        self.settings = Settings(device, self._lost)
        self._front = front = Front(model, arena, self._weights, tools, mail, self.settings)
        self._decode = one = Decode(model, arena, self._weights, tools)
        self._room = Room(device)
        sizes = [*(b for b in BUCKETS if b < grid), grid]
        prefills: list[Prefill] = []
        for bucket in reversed(sizes):  # the largest plans the work space
            prefills.insert(0, Prefill(model, arena, self._weights, tools, one, self._room, bucket,
                                       mail.ids, mail.count))
        self._prefills = dict(zip(sizes, prefills, strict=True))
        self._sample = front.sample(one)
        self._sample_first = front.sample(one, self.settings.wish)
        head = one.head(arena[COUNTER])
        self._runs: dict[object, Callable[[], None]] = {
            'step': _in_order(self._sample, one.run, head), 'rest': _in_order(one.run, head),
            'fold': _in_order(front.embed(one), one.run, one.head(None))}
        self._ladder: Ladder | None = None
        if self.block > 1:
            self._add_blocks(model)
        self._runs.update({bucket: p.run for bucket, p in self._prefills.items()})
        tools.finish()
        for each in prefills:
            each.warm_up()
        torch.cuda.synchronize(device)
        self.graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._next = -1  # where a step would follow the last one
        if not eager:
            self._capture()

    def _add_blocks(self, model) -> None:
        arena, front, mail = self.arena, self._front, self.mail
        few = Decode(model, arena, self._weights, self._tools, self.block, mail.count)
        self._runs['few'] = _in_order(
            front.embed(few), few.run, few.head(None, rows=few.x, shift=mail.count))
        self._ladder = Ladder(arena, self.block)
        draft = Decode(model, arena, self._weights, self._tools, self.block, mail.count,
                       self._ladder, like=few)
        first, *others = front.foretell(draft)
        self._runs['verify'] = _in_order(
            first, front.embed(draft, mail.said), draft.run, draft.heads(),
            front.foresee(self._ladder), *others)

    def _capture(self) -> None:
        for name, run in self._runs.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode='thread_local'):
                run()
            self.graphs[name] = graph
        torch.cuda.synchronize(self.arena.device)

    def append(self, ids: Sequence[int]) -> None:
        """
        Queue the fold of ``1..grid`` tokens; returns before the device has folded them.

        :raises InvalidArgument: for a chunk of another length or beyond the arena's capacity.
        :raises DeviceFault: if the device has failed.
        """
        position, count = self._ready(), len(ids)
        if not 1 <= count <= min(self.grid, self.arena.capacity - position):
            raise InvalidArgument(
                f'an append takes 1 to {self.grid} tokens within the context of '
                f'{self.arena.capacity}; this one has {count} at position {position}.')
        self._fold(ids, position)

    def step(self, emit: Callable[[int], object] | None = None) -> int:
        """
        Sample a token, hand it to ``emit`` while the device folds it; return it.

        Where it follows no other, somebody waits for it: the sampler is launched by itself then,
        since a graph takes longer to start, and with the settings that were chosen.

        :raises InvalidArgument: at position 0, where there are no logits, and at the capacity.
        :raises DeviceFault: if the device has failed or does not answer.
        """
        chosen, self.settings.waiting = self.settings.waiting, False
        position = self._ready()
        if not 0 < position < self.arena.capacity:
            raise InvalidArgument(
                f'a step needs at least one folded token and a free row; the position is '
                f'{position} of {self.arena.capacity}. Append a prompt, or roll back.')
        self.arena.will_write(position)
        first = chosen or position != self._next
        if first:
            self.mail.expect(partial(self._begin, self._sample_first if chosen else self._sample))
        else:
            self.mail.expect(partial(self._go, 'step'))
        self.arena.mirror = position + 1
        token = self._receive(first)
        self._next = position + 1
        if emit is not None:
            emit(token)
        return token

    def verify(self, draft: Sequence[int], emit: Callable[[int], object]) -> int:
        """
        Take the steps that a draft foresees, at least one, in one pass over the weights.

        The state, the tokens and what is handed out are those of as many calls of :meth:`step`,
        bit for bit. Nothing of the live state changes before it is known how far the draft holds.

        :param draft: guesses of the next tokens; more than ``block`` are left for later.
        :param emit: takes each token; True ends it with that token.
        :return: number of steps taken.
        :raises InvalidArgument, DeviceFault: as :meth:`step`.
        """
        position = self._ready()
        count = min(len(draft), self.block, self.arena.capacity - position)
        if count < 2 or not position or self.settings.waiting:
            self.step(emit)
            return 1
        assert self._ladder is not None
        self.arena.will_write(position)
        self._send(draft[:count])
        self.mail.expect(partial(self._go, 'verify'))
        self._receive()
        said, taken = self.mail.heard[:count].tolist(), 0
        while taken < count and (not taken or said[taken] == draft[taken]):
            taken += 1
            if emit(said[taken - 1]):
                break
        try:
            self.arena.fixed.copy_(self._ladder.blocks[taken - 1])
        except RuntimeError as error:
            raise self._lost(error) from error
        self.arena.mirror = self._next = position + taken
        return taken

    def _fold(self, ids: Sequence[int], position: int) -> None:
        self.arena.will_write(position)
        if len(ids) == 1 or len(ids) > decode.BLOCK:
            pieces = [ids]
        else:
            pieces = [ids[at:at + self.block] for at in range(0, len(ids), self.block)]
        for piece in pieces:
            self._send(piece)
            self._go('fold' if len(piece) == 1 else 'few' if len(piece) <= self.block
                     else next(bucket for bucket in self._prefills if bucket >= len(piece)))
        self.arena.mirror = position + len(ids)

    def _begin(self, sample: Launch) -> None:
        try:
            sample()
        except (RuntimeError, DeviceFault) as error:
            raise self._lost(error) from error
        self._go('rest')

    def _send(self, ids: Sequence[int]) -> None:
        try:
            self.mail.send(ids)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _receive(self, first: bool = False) -> int:
        try:
            return self.mail.receive(first, self.aside)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _go(self, name: object) -> None:
        try:
            if self.eager:
                self._runs[name]()
            else:
                self.graphs[name].replay()
        except (RuntimeError, DeviceFault) as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> DeviceFault:
        self.arena.valid = False
        return DeviceFault(f'the CUDA device failed ({error}); clean up and configure again.')

    def _ready(self) -> int:
        if not self.arena.valid:
            raise DeviceFault('the live state was invalidated by an earlier fault; restore a '
                              'capsule or reset the session before going on.')
        return self.arena.position


def _in_order(*launches: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for each in launches:
            each()

    return run


def work_bytes(model, capacity: int) -> int:
    """Return what a plan allocates beside weights and arena, with the largest blocks."""
    room, config = Room(torch.device('meta')), model.config
    for bucket in (*BUCKETS, GRID):
        prefill.plan_room(room, model, capacity, bucket)
    steps = sum(sum(decode.room_sizes(model, capacity, tokens)) for tokens in (1, decode.BLOCK))
    ladder = decode.BLOCK * manifest_of(model, config.vocab_size).fixed_bytes
    tables = capacity * config.rotary_dim * 8 if hasattr(config, 'rotary_dim') else 0
    return SMALL + room.nbytes + 4 * steps + ladder + tables
