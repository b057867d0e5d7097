"""
The plan of a CUDA device: a few captured graphs over one arena.

=========== ===================================== ==============================================
graph       does                                  used for
=========== ===================================== ==============================================
``step``    sample, hand out, fold, count         every generated token, at every position
``fold``    fold one known token                  appends of up to ``FEW`` tokens, replays
buckets     fold up to 32, 128, 512 known tokens  everything longer
=========== ===================================== ==============================================

Position, live count, sampler settings and counter are device scalars; nothing is baked in. All is
allocated and captured at construction and stays at its address. The host never waits for a fold:
it learns a token from a mailbox in pinned memory while the device folds it, and everything else is
ordered by the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import time

import torch

from flashrt_ros import sampling
from flashrt_ros.arena import Arena, POSITION
from flashrt_ros.cuda import decode, prefill
from flashrt_ros.cuda.decode import Decode, Weights
from flashrt_ros.cuda.driver import Launch, Toolbox
from flashrt_ros.cuda.prefill import Prefill, Room
from flashrt_ros.errors import DeviceFault, InvalidArgument
from flashrt_ros.models.layers.attention import GatedAttention
from flashrt_ros.plan import GRID, MAILBOX, TOKENS

FEW = 4  # known tokens that are folded one by one
BUCKETS = (32, 128)  # and the grid
RING = 8  # chunks of ids that may be on their way to the device
PATIENCE = 30.0  # seconds for a token, before the device counts as lost


class CudaGraphPlan:
    """
    Same verbs as :class:`flashrt_ros.plan.EagerPlan`; see there.

    :param eager: launch the same kernels one after another instead of replaying graphs (tests).
    :raises DeviceFault: where kernels cannot be compiled or loaded.
    """

    def __init__(self, model, arena: Arena, grid: int = GRID, eager: bool = False) -> None:
        decode.check_sizes(model)
        self.arena, self.grid, self.eager = arena, grid, eager
        device = arena.device
        self._tools = tools = Toolbox(device, model.dtype)
        self._weights = Weights(model, arena.capacity)
        self._decode = Decode(model, arena, self._weights, tools)
        self._room = Room(device)
        size = 8 + 4 * grid
        self._inbox = torch.zeros(size, dtype=torch.uint8, device=device)
        self._ring = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(RING)]
        self._sent_off = [torch.cuda.Event() for _ in range(RING)]
        self._turn = 0
        count, ids = self._inbox[:8].view(torch.int64), self._inbox[8:].view(torch.int32)
        self._box = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._word = self._box.numpy()
        self._sent = torch.zeros(1, dtype=torch.int32, device=device)
        self._number = 0
        self._sample, self._embed = self._front(model, ids)
        step_head = self._decode.head(arena['sampler.counter'])
        fold_head = self._decode.head(None)
        sizes = [*(b for b in BUCKETS if b < grid), grid]
        prefills: list[Prefill] = []
        for bucket in reversed(sizes):  # the largest plans the work space
            prefills.insert(0, Prefill(model, arena, self._weights, tools, self._decode,
                                       self._room, bucket, ids, count))
        self._prefills = dict(zip(sizes, prefills, strict=True))

        def step() -> None:
            self._sample()
            self._decode.run()
            step_head()

        def fold() -> None:
            self._embed()
            self._decode.run()
            fold_head()

        self._runs: dict[object, Callable[[], None]] = {'step': step, 'fold': fold}
        self._runs.update({bucket: p.run for bucket, p in self._prefills.items()})
        for each in prefills:
            each.warm_up()
        torch.cuda.synchronize(device)
        self.graphs: dict[object, torch.cuda.CUDAGraph] = {}
        if not eager:
            self._capture()

    def _front(self, model, ids: torch.Tensor) -> tuple[Launch, Launch]:
        """Return the launches in front of the first layer: sampler and plain embedding."""
        arena, tools, config = self.arena, self._tools, model.config
        blocks = min(128, tools.multiprocessors)
        table, x = self._weights.table, self._decode.x
        sizes = {'V': config.vocab_size, 'HIDDEN': config.hidden, 'BLOCKS': blocks}
        work = 16 + 8 * (1 + 2 * 2048 + 4096 + 6 * 2048 + 3 * blocks + 1)  # struct Work
        self._work = torch.zeros(work, dtype=torch.uint8, device=arena.device)
        sample = Launch(tools.kernel('sample.cu', 'sample', **sizes), (blocks,), 512, (
            arena[sampling.LOGITS], arena['sampler.temperature'], arena['sampler.top_p'],
            arena['sampler.top_k'], arena['sampler.seed'], arena['sampler.counter'],
            arena[POSITION], arena[MAILBOX], self._box, self._sent, table, x, arena[TOKENS],
            self._work, *decode.NOTHING))
        sample.ask_ahead(self._decode.first, decode.AHEAD)
        embed = Launch(tools.kernel('sample.cu', 'embed', **sizes), (1,), 512, (
            ids, arena[POSITION], table, x, arena[TOKENS]))
        return sample, embed

    def _capture(self) -> None:
        for name, run in self._runs.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode='thread_local'):
                run()
            self.graphs[name] = graph
        torch.cuda.synchronize(self.arena.device)

    @property
    def work_bytes(self) -> int:
        """Bytes of work space outside the arena."""
        return self._room.nbytes + self._work.nbytes

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

    def step(self, emit: Callable[[int], None] | None = None) -> int:
        """
        Sample a token, hand it to ``emit`` while the device folds it; return it.

        :raises InvalidArgument: at position 0, where there are no logits, and at the capacity.
        :raises DeviceFault: if the device has failed or does not answer.
        """
        position = self._ready()
        if not 0 < position < self.arena.capacity:
            raise InvalidArgument(
                f'a step needs at least one folded token and a free row; the position is '
                f'{position} of {self.arena.capacity}. Append a prompt, or roll back.')
        self.arena.will_write(position)
        if self._number < 0:  # a step failed on its way: how many tokens were handed out?
            self._number = int(self._sent.item()) & 0xffffffff
        number, self._number = (self._number + 1) & 0xffffffff, -1
        self._go('step')
        self._number = number
        self.arena.mirror = position + 1
        token = self._receive()
        if emit is not None:
            emit(token)
        return token

    def _fold(self, ids: Sequence[int], position: int) -> None:
        self.arena.will_write(position)
        if len(ids) <= FEW:
            for token in ids:
                self._stage([token])
                self._go('fold')
        else:
            self._stage(ids)
            self._go(next(bucket for bucket in self._prefills if bucket >= len(ids)))
        self.arena.mirror = position + len(ids)

    def _go(self, name: object) -> None:
        try:
            if self.eager:
                self._runs[name]()
            else:
                self.graphs[name].replay()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _stage(self, ids: Sequence[int]) -> None:
        """Send count and ids to the device; a slot of the ring is ours until it was copied."""
        slot, event = self._ring[self._turn], self._sent_off[self._turn]
        self._turn = (self._turn + 1) % RING
        event.synchronize()
        end = 8 + 4 * len(ids)
        slot[:8].view(torch.int64)[0] = len(ids)
        slot[8:end].view(torch.int32).copy_(torch.tensor(ids, dtype=torch.int32))
        try:
            self._inbox[:end].copy_(slot[:end], non_blocking=True)
            event.record()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _receive(self) -> int:
        """Wait for the token of the step that was queued last."""
        word, spins, deadline = self._word, 0, 0.0
        while True:
            value = int(word[0])
            if (value >> 32) & 0xffffffff == self._number:
                return value & 0xffffffff
            spins += 1
            if spins % 4096 == 0:  # is the device alive?
                now = time.monotonic()
                deadline = deadline or now + PATIENCE
                try:
                    done = torch.cuda.current_stream(self.arena.device).query()
                except RuntimeError as error:
                    raise self._lost(error) from error
                if (done and (int(word[0]) >> 32) & 0xffffffff != self._number) or now > deadline:
                    raise self._lost(RuntimeError('the device did not hand out a token'))
            time.sleep(0)  # callbacks of the same process may run meanwhile

    def _lost(self, error: BaseException) -> DeviceFault:
        self.arena.valid = False
        return DeviceFault(f'the CUDA device failed ({error}); clean up and configure again.')

    def _ready(self) -> int:
        if not self.arena.valid:
            raise DeviceFault('the live state was invalidated by an earlier fault; restore a '
                              'capsule or reset the session before going on.')
        return self.arena.position


def work_bytes(model, capacity: int) -> int:
    """Return an upper bound of what a plan allocates beside the arena."""
    total, widest = 64 << 20, 0
    for layer in model.layers:
        if isinstance(layer, GatedAttention):
            heads, dim = layer.heads, layer.head_dim
            chunk = -(-capacity // prefill.SPLIT) * GRID * heads * (dim + 2) * 4
            one = -(-2 * capacity // decode.SPLIT) * heads * (dim + 2) * 4
            widest = max(widest, chunk + one)
    config = model.config
    wide = max(getattr(layer, 'intermediate', 0) for layer in model.layers)
    tables = capacity * config.rotary_dim * 8 if hasattr(config, 'rotary_dim') else 0
    return total + widest + tables + GRID * 8 * (4 * config.hidden + 4 * wide)
