"""The answers that every client is held against, computed once on a bare engine."""

from __future__ import annotations

from dataclasses import dataclass
import itertools
import json
from pathlib import Path

SCENES = ('The cup is on the table. The door is open.',
          'Kitchen: mug, plate, kettle; a person stands near the sink and waits for tea.',
          'Corridor, two doors, one of them shut.')
PROMPTS = ('go', 'bring me the cup', 'where is the door', 'xyz')
TOKENS = 24   # of a short answer
LONG = 600    # of one that is made to be interrupted
CONTEXT = 4096
State = tuple[int, tuple[int, ...]]  # which scene, and which prompts were answered since


@dataclass(frozen=True)
class Answer:
    """What a goal has to return."""

    token_ids: list[int]
    text: str
    prompt_tokens: int
    position: int


class Reference:
    """
    Known answers by state and prompt.

    :ivar positions: where each state stands.
    """

    def __init__(self, document: dict) -> None:
        self.positions = {_state(key): value for key, value in document['positions'].items()}
        self.short = {_state(key): Answer(**value) for key, value in document['short'].items()}
        self.long = {_state(key): Answer(**value) for key, value in document['long'].items()}

    @classmethod
    def load(cls, path: Path) -> Reference:
        return cls(json.loads(path.read_text()))


def compute(model: str, threads: int) -> dict:
    """Answer everything cold, each in a new session of an engine that no node wraps."""
    from flashrt_ros.engine import Engine, EngineConfig
    from flashrt_ros.results import GenerateRequest
    engine = Engine(EngineConfig(model=model, context=CONTEXT, threads=threads))
    positions: dict[str, int] = {}
    short: dict[str, dict] = {}
    long: dict[str, dict] = {}
    for scene, first in itertools.product(range(len(SCENES)), range(len(PROMPTS))):
        for chain in [(first,), *((first, second) for second in range(len(PROMPTS)))]:
            engine.reset()
            begin = engine.generate(GenerateRequest(prompt=SCENES[scene], max_tokens=0))
            positions[_key(scene, ())] = begin.position
            for depth in range(1, len(chain) + 1):
                answer = engine.generate(GenerateRequest(
                    prompt=PROMPTS[chain[depth - 1]], max_tokens=TOKENS, temperature=0.0))
                short[_key(scene, chain[:depth])] = _answer(answer)
                positions[_key(scene, chain[:depth])] = answer.position
        engine.reset()
        engine.generate(GenerateRequest(prompt=SCENES[scene], max_tokens=0))
        long[_key(scene, (first,))] = _answer(engine.generate(GenerateRequest(
            prompt=PROMPTS[first], max_tokens=LONG, temperature=0.0)))
    engine.close()
    return {'positions': positions, 'short': short, 'long': long}


def _answer(generation) -> dict:
    # DDS cannot carry a NUL; the node says U+FFFD instead.
    text = generation.text.replace('\0', '\N{REPLACEMENT CHARACTER}')
    return {'token_ids': list(generation.token_ids), 'text': text,
            'prompt_tokens': generation.position - len(generation.token_ids),
            'position': generation.position}


def _key(scene: int, chain: tuple[int, ...]) -> str:
    return json.dumps([scene, list(chain)])


def _state(key: str) -> State:
    scene, chain = json.loads(key)
    return scene, tuple(chain)
