"""What stands in front of the first layer: choosing a token, and embedding known ones."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from flashrt_ros import sampling
from flashrt_ros.arena import Arena, POSITION
from flashrt_ros.cuda import decode
from flashrt_ros.cuda.decode import Decode, Ladder, Weights
from flashrt_ros.cuda.driver import Launch, Toolbox
from flashrt_ros.cuda.mail import Mail
from flashrt_ros.cuda.settings import Settings, Wish
from flashrt_ros.plan import MAILBOX, TOKENS

COUNTER = 'sampler.counter'


class Front:
    """Launches of ``sample.cu`` over one arena, all with the same work space."""

    def __init__(self, model, arena: Arena, weights: Weights, tools: Toolbox, mail: Mail,
                 settings: Settings) -> None:
        self._arena, self._weights, self._tools, self._mail = arena, weights, tools, mail
        self._settings, self._no_wish = settings, Wish()
        self._blocks = blocks = min(128, tools.multiprocessors)
        config = model.config
        self._sizes = {'V': config.vocab_size, 'HIDDEN': config.hidden, 'BLOCKS': blocks}
        work = 16 + 8 * (1 + 2 * 2048 + 4096 + 6 * 2048 + 3 * blocks + 1)  # struct Work
        self.work = torch.zeros(work, dtype=torch.uint8, device=arena.device)

    def sample(self, run: Decode, wish: Wish | None = None) -> Launch:
        """
        Choose the next token, hand it out, put its embedding in front of ``run``.

        :param wish: of settings to choose first; of a launch outside of a graph.
        """
        launch = self._sample(self._arena[sampling.LOGITS], run.x, None, None, 0, 1, wish)
        launch.ask_ahead(run.first, decode.AHEAD)
        return launch

    def foretell(self, run: Decode) -> list[Launch]:
        """
        Choose the tokens that a block is checked against, the first one from the live logits.

        The other ones come from the logits of the ladder, with the counter that steps would have.
        """
        assert run.ladder is not None
        logits, pitch = run.ladder.at(sampling.LOGITS)
        flat = torch.as_strided(logits, (run.tokens, logits.numel()), (pitch.value, 1),
                                logits.storage_offset())
        sources = [self._arena[sampling.LOGITS], *flat[:-1]]
        return [self._sample(each, run.x, self._mail.said, self._mail.heard, index, run.tokens)
                for index, each in enumerate(sources)]

    def _sample(self, logits: Tensor, x: Tensor, said: Tensor | None, heard: Tensor | None,
                index: int, block: int, wish: Wish | None = None) -> Launch:
        arena, mail = self._arena, self._mail
        kernel = self._tools.kernel('sample.cu', 'sample', **self._sizes)
        return Launch(kernel, (self._blocks,), 512, (
            logits, arena['sampler.temperature'], arena['sampler.top_p'], arena['sampler.top_k'],
            arena['sampler.seed'], arena[COUNTER], arena[POSITION], arena[MAILBOX], mail.box,
            mail.sent, self._weights.table, x, arena[TOKENS], self.work, said, heard,
            wish or self._no_wish, self._settings.told, index, block, *decode.NOTHING),
            chained=wish is None)

    def embed(self, run: Decode, chosen: Tensor | None = None) -> Launch:
        """Put the embeddings of the ids that were sent in front of ``run``."""
        arena, mail = self._arena, self._mail
        return Launch(self._tools.kernel('sample.cu', 'embed', **self._sizes), (run.tokens,), 512, (
            mail.ids, chosen, run.count, arena[POSITION], self._weights.table, run.x,
            arena[TOKENS]))

    def foresee(self, ladder: Ladder) -> Launch:
        """Fill the rest of a ladder: settings as they are, position and counter as they will be."""
        arena, offsets = self._arena, self._arena.manifest.offsets
        begin = offsets['sampler.temperature']
        numbers = (ladder.blocks.shape[1], begin, offsets[COUNTER], offsets[POSITION],
                   offsets[COUNTER])
        return Launch(self._tools.kernel('sample.cu', 'foresee', **self._sizes),
                      (ladder.blocks.shape[0],), 32,
                      (arena.fixed, ladder.blocks, *map(ctypes.c_int64, numbers)))
