"""What host and device tell each other: ids on their way in, chosen tokens on their way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import os
import time

import torch

RING = 8  # chunks of ids that may be on their way to the device
PATIENCE = 30.0  # seconds for a token, before the device counts as lost
EAGER = 2e-3  # seconds that a wait for a first token keeps a core busy before it naps


class Mail:
    """
    Pinned memory on both ways, allocated once.

    :param size: most ids of a message.
    :param block: most tokens that one message back may hold.
    :ivar count: int64 scalar on the device, how many ids were sent last; ``ids`` int32 beside it.
    :ivar box: one pinned word, ``number << 32 | token``; a kernel writes it with one store.
    :ivar sent: int32 on the device, the number of the last message.
    :ivar said: int32 on the device, tokens of a block; ``heard`` is its pinned twin.
    """

    def __init__(self, device: torch.device, size: int, block: int) -> None:
        self._device = device
        nbytes = 8 + 4 * size
        self._inbox = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.count = self._inbox[:8].view(torch.int64)
        self.ids = self._inbox[8:].view(torch.int32)
        self._ring = [torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(RING)]
        self._counts = [slot[:8].view(torch.int64).numpy() for slot in self._ring]
        self._ids = [slot[8:].view(torch.int32).numpy() for slot in self._ring]
        self._gone = [torch.cuda.Event() for _ in range(RING)]
        self._turn = 0
        self.box = torch.zeros(1, dtype=torch.int64).pin_memory()
        self.sent = torch.zeros(1, dtype=torch.int32, device=device)
        self.said = torch.zeros(block, dtype=torch.int32, device=device)
        self.heard = torch.zeros(block, dtype=torch.int32).pin_memory()
        self._word = self.box.numpy()
        self._number = 0

    def send(self, ids: Sequence[int]) -> None:
        """Queue count and ids for the device; a slot of the ring is ours until it was copied."""
        turn, gone = self._turn, self._gone[self._turn]
        self._turn = (turn + 1) % RING
        gone.synchronize()
        self._counts[turn][0] = len(ids)
        self._ids[turn][:len(ids)] = ids
        self._inbox.copy_(self._ring[turn], non_blocking=True)
        gone.record()

    def forget(self) -> None:
        """Somebody else launched what writes messages: ask for their number next time."""
        self._number = -1

    def expect(self, launch: Callable[[], None]) -> None:
        """Launch what will write the next message."""
        if self._number < 0:  # a launch failed on its way: how many messages were written?
            self._number = int(self.sent.item()) & 0xffffffff
        number, self._number = (self._number + 1) & 0xffffffff, -1
        launch()
        self._number = number

    def receive(self, first: bool = False, meanwhile: Callable[[], None] | None = None) -> int:
        """
        Wait for the message that is expected; return its token.

        :param first: somebody waits for this very token, not for one that follows another: do not
            nap, which takes 50 microseconds or more.
        :param meanwhile: called now and then, from the second look on.
        :raises RuntimeError: if the device failed, or ended without a word.
        """
        word, number, spins = self._word, self._number, 0
        began = time.monotonic()
        while True:
            value = int(word[0])
            if (value >> 32) & 0xffffffff == number:
                return value & 0xffffffff
            spins += 1
            if spins % 256 == 0:  # is the device alive?
                waited = time.monotonic() - began
                first = first and waited < EAGER
                done = torch.cuda.current_stream(self._device).query()
                if ((done and (int(word[0]) >> 32) & 0xffffffff != number)
                        or waited > PATIENCE):
                    raise RuntimeError('the device did not hand out a token')
            if meanwhile is not None and (not first or spins % 16 == 0):
                meanwhile()
            if first:
                os.sched_yield()
            else:
                time.sleep(0)  # callbacks of the same process run meanwhile
