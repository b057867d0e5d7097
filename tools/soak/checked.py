"""What a client of the soak knows of its own session, and how it holds answers against it."""

from __future__ import annotations

import random
import time
from typing import Any

from ledger import Ledger
from reference import Answer, PROMPTS, Reference, SCENES, State, TOKENS

from flashrt_ros.client import FlashrtClient, Stream
from flashrt_ros.errors import DeadlineExceeded, FlashrtError
from flashrt_ros.msg import Token

PATIENCE = 60.0    # seconds until a call counts as stuck


class CheckedClient:
    """
    Checks what comes back, and writes down what must not be.

    :ivar state: which known state its session is in.
    """

    def __init__(self, client: FlashrtClient, number: int, reference: Reference, ledger: Ledger,
                 dice: random.Random) -> None:
        self.client = client
        self.reference = reference
        self.ledger = ledger
        self.dice = dice
        self.session = f'soak_{number}'
        self.state: State = (0, ())
        self.epoch = 0
        self.own: dict[str, State] = {}
        self.serial = 0
        self.prefix = f'own_{number}.'

    def restore(self, on_busy: str = 'wait') -> None:
        scene = self.dice.randrange(len(SCENES))
        response = self.client.restore(f'scene_{scene}', self.session, on_busy=on_busy)
        self.state = (scene, ())
        self.check_epoch(response.epoch, True)
        self.ledger.expect(response.tokens_reused == self.reference.positions[self.state],
                           'tokens reused', found=response.tokens_reused)

    def check_epoch(self, epoch: int, new: bool) -> None:
        good = epoch > self.epoch if new else epoch == self.epoch
        self.ledger.expect(good, 'epoch', new=new, before=self.epoch, after=epoch)
        self.epoch = epoch

    def check_stream(self, stream: Stream, result: Any) -> None:
        """A stream is gapless, of one goal, and says what its result says."""
        for _ in stream:
            pass
        tokens = stream.tokens
        if stream.made_up:
            # Tokens and result take different ways, and the iterator waits half a second only
            # for a tail that is late: then it comes from the result.
            self.ledger.count('late tails')
        self.ledger.count('messages', len(tokens))
        self.ledger.expect([t.seq for t in tokens] == list(range(len(tokens))), 'seq',
                           found=[t.seq for t in tokens][:50])
        ids = [i for t in tokens for i in t.token_ids]
        self.ledger.expect(ids == list(result.token_ids), 'stream is not the result',
                           stream=len(ids), result=len(result.token_ids))
        self.ledger.expect(''.join(t.text for t in tokens) == result.text, 'text of the stream')
        self.ledger.expect(len({t.epoch for t in tokens}) <= 1, 'epochs within a goal')
        if tokens:
            self.ledger.expect(tokens[-1].finish_reason == result.finish_reason, 'finish reason')
            self.ledger.expect(all(t.finish_reason == Token.RUNNING for t in tokens[:-1]),
                               'finish reason before the end')

    def check_answer(self, result: Any, answer: Answer, **facts: object) -> None:
        self.ledger.count('tokens', len(result.token_ids))
        same = (list(result.token_ids) == answer.token_ids and result.text == answer.text
                and result.position == answer.position
                and result.prompt_tokens == answer.prompt_tokens)
        self.ledger.expect(same, 'wrong answer', state=self.state, position=result.position,
                           wanted_position=answer.position, ids=list(result.token_ids),
                           wanted=answer.token_ids, text=result.text == answer.text,
                           prompt_tokens=(result.prompt_tokens, answer.prompt_tokens), **facts)

    def check_part(self, result: Any, answer: Answer, **facts: object) -> None:
        """What was generated until an interruption is the beginning of the known answer."""
        ids = list(result.token_ids)
        self.ledger.count('tokens', len(ids))
        self.ledger.expect(ids == answer.token_ids[:len(ids)], 'wrong part', state=self.state,
                           ids=ids[:40], wanted=answer.token_ids[:40], **facts)

    # -- tools of the actions ---------------------------------------------------------------

    def _deep(self) -> None:
        if len(self.state[1]) >= 2:
            self.restore()

    def _pick(self) -> int:
        return self.dice.randrange(len(PROMPTS))

    def _goal(self, prompt: int, session: str = '', **fields: Any) -> Stream:
        fields.setdefault('max_tokens', TOKENS)
        fields.setdefault('temperature', 0.0)
        return self.client.generate(PROMPTS[prompt], session=session or self.session, **fields)

    def _refusal(self, code: str, call: Any) -> None:
        try:
            call()
            found = 'NONE'
        except DeadlineExceeded:
            raise
        except FlashrtError as error:
            found = error.code
        self.ledger.expect(found == code, 'code of a refusal', found=found, wanted=code)

    def pause(self, seconds: float) -> None:
        """Let messages come in for a while, as a node that does other things would."""
        until = time.monotonic() + seconds
        self.client.wait_for(lambda: time.monotonic() >= until, None)
