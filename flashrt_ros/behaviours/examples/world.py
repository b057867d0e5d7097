"""A simulated robot in a kitchen: enough to carry skill calls out, and to fail at them."""

from __future__ import annotations

from dataclasses import dataclass, field
import json
import re
from typing import Any

ARGUMENTS = {
    'navigate': {'to'}, 'open': {'place'}, 'close': {'place'}, 'pick': {'object'},
    'place': {'object', 'on', 'in'}, 'pour': {'from', 'into'}, 'switch': {'object', 'state'},
    'handover': {'object', 'to'}, 'say': {'text'}}  #: what a skill may be called with


def parse(text: str) -> list[dict[str, str]]:
    """
    Return the skill calls of a plan, one JSON object a line.

    :raises ValueError: a line is no skill call. A model's words are checked before a robot moves.
    """
    calls = []
    for line in filter(str.strip, text.splitlines()):
        try:
            call = json.loads(line)
            name = call['skill']
            known = ARGUMENTS[name] >= call.keys() - {'skill'} and all(
                isinstance(value, str) for value in call.values())
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f'no skill call: {line}') from None
        if not known:
            raise ValueError(f'{name} does not take this: {line}')
        calls.append(call)
    if not calls:
        raise ValueError('an empty plan')
    return calls


@dataclass
class Trouble:
    """
    Skills that fail on purpose.

    Args:
        spec: SKILL, SKILL:OBJECT or SKILL:OBJECT*TIMES; 'none' for no trouble
    """

    spec: str = 'none'
    left: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Read the specification."""
        match = re.fullmatch(r'(\w+)(?::([\w.-]+))?(?:\*(\d+))?', self.spec)
        if match is None or match[1] not in (*ARGUMENTS, 'none'):
            raise ValueError(f'{self.spec!r} is not SKILL, SKILL:OBJECT or SKILL:OBJECT*TIMES')
        self.skill, self.thing = match[1], match[2]
        self.left = float(match[3]) if match[3] else float('inf')

    def strikes(self, call: dict[str, str]) -> bool:
        """Tell whether this call fails, and count it."""
        hit = call['skill'] == self.skill and self.thing in (None, call.get('object'))
        if hit and self.left > 0:
            self.left -= 1
            return True
        return False


class World:
    """
    Places, things and the robot, read from a scene's text.

    Args:
        scene: text as the embedded planner reads it
        trouble: what fails on purpose
    """

    def __init__(self, scene: str, trouble: Trouble | None = None) -> None:
        self.trouble = trouble or Trouble()
        lines = dict(line.partition(': ')[::2] for line in scene.splitlines()
                     if not line.startswith('- '))
        self.at = lines['robot'].split(',')[0].removeprefix('at ')
        self.holding = ''
        self.open: dict[str, bool] = {
            name: state == 'open'
            for name, state in re.findall(r'(\w+) \((open|closed)\)', lines.get('containers', ''))}
        self.people = dict(re.findall(r'(\w+) at (\w+)', lines.get('people', '')))
        self.things = {name: place for place, name in re.findall(
            r'^- .* (?:on|in) (\w+): (\w+)$', scene, re.MULTILINE)}
        self.places = {*self.open, *self.people.values(), *self.things.values(), self.at,
                       *re.findall(r'\w+', lines.get('surfaces', '') + ' '
                                   + lines.get('spots', ''))}
        self.done: list[dict[str, str]] = []

    def do(self, call: dict[str, str]) -> str:
        """Carry a skill out; return why it failed, '' for success."""
        if self.trouble.strikes(call):
            return 'failed on purpose'
        why: Any = getattr(self, f'_{call["skill"]}', lambda call: '')(call)
        if not why:
            self.done.append(call)
        return str(why or '')

    def _navigate(self, call: dict[str, str]) -> str:
        goal = self.people.get(call['to'], call['to'])
        if goal not in self.places:
            return f'no way to {call["to"]}'
        self.at = goal
        return ''

    def _open(self, call: dict[str, str]) -> str:
        if call['place'] != self.at or call['place'] not in self.open:
            return f'{call["place"]} is not here'
        self.open[call['place']] = True
        return ''

    def _close(self, call: dict[str, str]) -> str:
        if call['place'] != self.at or call['place'] not in self.open:
            return f'{call["place"]} is not here'
        self.open[call['place']] = False
        return ''

    def _pick(self, call: dict[str, str]) -> str:
        if self.holding:
            return f'the gripper holds {self.holding}'
        place = self.things.get(call['object'])
        if place != self.at or not self.open.get(place, True):
            return f'{call["object"]} is not within reach'
        self.holding = call['object']
        del self.things[call['object']]
        return ''

    def _place(self, call: dict[str, str]) -> str:
        place = call.get('on', call.get('in', ''))
        if self.holding != call['object'] or place != self.at or not self.open.get(place, True):
            return f'cannot put {call["object"]} at {place}'
        self.things[self.holding], self.holding = place, ''
        return ''

    def _handover(self, call: dict[str, str]) -> str:
        if self.holding != call['object'] or self.people.get(call['to']) != self.at:
            return f'cannot hand {call["object"]} to {call["to"]}'
        self.things[self.holding], self.holding = call['to'], ''
        return ''

    def _pour(self, call: dict[str, str]) -> str:
        return '' if self.holding == call['from'] else f'{call["from"]} is not in the gripper'
