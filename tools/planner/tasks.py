"""Tasks: what is asked, the reference plan that answers it, and the composition keys it touches."""

from __future__ import annotations

from dataclasses import dataclass
import hashlib
import json

from phrases import QUESTIONS, TEMPLATES
from world import LOW_BATTERY, preposition, Refusal, Thing, World

HELD_OUT_PERCENT = 8
# Allowed on a low battery: none of these drives anywhere but home.
HARMLESS = ('dock', 'wait', 'look', 'say')


def held_out(key: str) -> bool:
    """Say whether a composition key belongs to the test split; a pure function of the key."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


@dataclass
class Ref:
    """A spoken reference to an object; `resolve` finds it in the scene or refuses."""

    kind: str
    spoken: str
    colour: str = ''
    material: str = ''
    place: str = ''
    name: str = ''
    pronoun: bool = False

    def matches(self, world: World) -> list[Thing]:
        return [
            t
            for t in world.things
            if t.kind == self.kind
            and (not self.name or t.name == self.name)
            and (not self.colour or t.colour == self.colour)
            and (not self.material or t.material == self.material)
            and (not self.place or t.at == self.place)
        ]

    def resolve(self, world: World) -> Thing:
        if self.pronoun:
            thing = world.last or world.held
            if thing is None:
                raise Refusal('no_it', 'I do not know what you mean by it.')
            return thing
        found = self.matches(world)
        if not found:
            if self.name:
                raise Refusal('absent', f'There is no {self.name} in the scene.')
            what = ' '.join(w for w in (self.colour, self.material, self.kind) if w)
            raise Refusal('absent', f'There is no {what} in the scene.')
        if len(found) > 1:
            raise Refusal('ambiguous', f'Which {self.kind} do you mean?')
        return found[0]

    def text(self) -> str:
        return 'it' if self.pronoun else self.spoken


@dataclass
class Step:
    """One task with its arguments. `template` is an index: part of the paraphrase key."""

    task: str
    template: int = 0
    obj: Ref | None = None
    other: Ref | None = None
    place: str = ''
    spoken_place: str = ''
    person: str = ''
    value: str | int = ''
    spoken: str = ''

    def keys(self) -> list[str]:
        """Return the composition keys: arguments, paraphrase x argument, attribute x type."""
        kind = self.obj.kind if self.obj else ''
        dest = self.place or (self.other.kind if self.other else '')
        keys = []
        if kind or dest:
            keys.append(f'args|{self.task}|{kind or "-"}|{dest or "-"}')
            keys.append(f'phrase|{self.task}|{self.template}|{kind or dest}')
        for ref in (self.obj, self.other):
            if ref and not ref.pronoun:
                keys += [f'attr|{a}|{ref.kind}' for a in (ref.colour, ref.material) if a]
        return keys

    def text(self) -> str:
        table = QUESTIONS if self.task in QUESTIONS else TEMPLATES
        slots = {
            'p': self.spoken_place,
            'n': self.person,
            'd': self.spoken,
            'm': self.spoken,
            't': self.spoken,
        }
        if self.place:
            slots['pp'] = f'{preposition(self.place)} {self.spoken_place}'
        if self.obj:
            slots['o'] = self.obj.text()
        if self.other:
            slots['q'] = self.other.text()
        slots['x'] = slots.get('o') or self.spoken_place or self.person
        return table[self.task][self.template].format(**slots)

    def run(self, world: World) -> list[dict]:
        """
        Apply the step to the world and return its calls; raise Refusal and leave it half done.
        """
        if self.task in QUESTIONS:
            return [{'skill': 'say', 'text': answer(self, world)}]
        thing = self.obj.resolve(world) if self.obj else None
        other = self.other.resolve(world) if self.other else None
        place, person = self.place, self.person
        if place and place not in world.places:
            raise Refusal('no_place', f'I do not know {place}.')
        if self.task.endswith('_me'):
            person = world.speaker
        elif person and person not in world.people:
            raise Refusal('no_person', f'There is no {person} here.')
        calls = _ACTIONS[self.task](self, world, thing, other, place, person)
        if thing is not None:
            world.last = thing
        return calls


def _goto(step, world, thing, other, place, person):
    target = place or person
    return world.go(target)


def _pick(step, world, thing, other, place, person):
    if world.held is thing:
        raise Refusal('gripper', f'I am already holding {thing.name}.')
    return world.fetch(thing)


def _move(step, world, thing, other, place, person):
    if thing.at == place:
        raise Refusal('already', f'{thing.name} is already {preposition(place)} {place}.')
    return world.fetch(thing) + world.put(place)


def _pour(step, world, thing, other, place, person):
    if not thing.content:
        raise Refusal('empty', f'{thing.name} is empty.')
    if other.content:
        raise Refusal('full', f'{other.name} is already full.')
    if other.at in world.people:
        raise Refusal('has_it', f'{other.at} has {other.name}.')
    calls = world.fetch(thing) + world.reach(other.at)
    other.content, thing.content = thing.content, ''
    return calls + [{'skill': 'pour', 'from': thing.name, 'into': other.name}]


def _at_thing(world, thing):
    if thing.at in world.people:
        raise Refusal('has_it', f'{thing.at} has {thing.name}.')
    return world.reach(thing.at) if thing.at else []


def _push(step, world, thing, other, place, person):
    if world.held is thing:
        raise Refusal('gripper', f'I am already holding {thing.name}.')
    return _at_thing(world, thing) + [
        {'skill': 'push', 'object': thing.name, 'direction': step.value}
    ]


def _switch(step, world, thing, other, place, person):
    if thing.power == step.task:
        raise Refusal('already', f'{thing.name} is already {step.task}.')
    calls = _at_thing(world, thing)
    thing.power = step.task
    return calls + [{'skill': 'switch', 'object': thing.name, 'state': step.task}]


def _door(step, world, thing, other, place, person):
    closing = step.task == 'close'
    if world.closed[place] == closing:
        raise Refusal('already', f'{place} is already {"closed" if closing else "open"}.')
    calls = world.go(place)
    world.closed[place] = closing
    return calls + [{'skill': step.task, 'place': place}]


def _look(step, world, thing, other, place, person):
    return [{'skill': 'look_at', 'target': thing.name if thing else place or person}]


def _dock(step, world, thing, other, place, person):
    if world.at == 'dock':
        raise Refusal('already', 'I am already at dock.')
    world.at = 'dock'
    return [{'skill': 'dock'}]


def _say(text):
    return {'skill': 'say', 'text': text[0].upper() + text[1:] + '.'}


_ACTIONS = {
    'goto_place': _goto,
    'goto_person': _goto,
    'goto_me': _goto,
    'pick': _pick,
    'move': _move,
    'bring_me': lambda s, w, t, o, p, n: w.fetch(t) + w.hand(n),
    'bring_person': lambda s, w, t, o, p, n: w.fetch(t) + w.hand(n),
    'pour': _pour,
    'push': _push,
    'on': _switch,
    'off': _switch,
    'open': _door,
    'close': _door,
    'look': _look,
    'dock': _dock,
    'wipe': lambda s, w, t, o, p, n: w.go(p) + [{'skill': 'wipe', 'place': p}],
    'tell': lambda s, w, t, o, p, n: w.go(n) + [_say(s.value)],
    'say': lambda s, w, t, o, p, n: [_say(s.value)],
    'wait': lambda s, w, t, o, p, n: [{'skill': 'wait', 'seconds': s.value}],
    'follow': lambda s, w, t, o, p, n: w.go(n) + [{'skill': 'follow', 'person': n}],
    'follow_me': lambda s, w, t, o, p, n: w.go(n) + [{'skill': 'follow', 'person': n}],
}


def answer(step: Step, world: World) -> str:
    """Return what the robot says to a question about the scene."""
    task, place = step.task, step.place
    if task == 'battery':
        return f'My battery is at {world.battery} %.'
    if task == 'holding':
        return f'I am holding {world.held.name}.' if world.held else 'My gripper is empty.'
    if task == 'self':
        return f'I am at {world.at}.'
    if task == 'count':
        return f'I count {len(step.obj.matches(world))}.'
    if task == 'where_person':
        if step.person not in world.people:
            raise Refusal('no_person', f'There is no {step.person} here.')
        return f'{step.person} is at {world.people[step.person]}.'
    if place:
        if place not in world.places:
            raise Refusal('no_place', f'I do not know {place}.')
        if task == 'is_open':
            return f'{place} is {"closed" if world.closed[place] else "open"}.'
        names = [t.name for t in world.things if t.at == place]
        where = f'{preposition(place)} {place}'
        return f'I see {", ".join(names)} {where}.' if names else f'I see nothing {where}.'
    thing = world.last = step.obj.resolve(world)
    if task == 'colour':
        return f'{thing.name} is {thing.colour}.'
    if task == 'content':
        return (
            f'{thing.name} is full of {thing.content}.'
            if thing.content
            else f'{thing.name} is empty.'
        )
    if thing.at == '':
        return f'I am holding {thing.name}.'
    if thing.at in world.people:
        return f'{thing.at} has {thing.name}.'
    return f'{thing.name} is {preposition(thing.at)} {thing.at}.'

def plan(steps: list[Step], world: World) -> tuple[list[dict], str]:
    """
    Return (calls, kind). All or nothing: one step that cannot be done refuses the instruction.
    """
    world.route = ''
    try:
        if world.battery < LOW_BATTERY:
            if any(s.task not in QUESTIONS and s.task not in HARMLESS for s in steps):
                raise Refusal(
                    'battery', f'My battery is at {world.battery} %, I have to dock first.'
                )
        calls = [call for step in steps for call in step.run(world)]
    except Refusal as refusal:
        return [{'skill': 'say', 'text': refusal.text}], refusal.kind
    return calls, 'question' if steps[0].task in QUESTIONS else 'ok'


def render_calls(calls: list[dict]) -> str:
    """Return the answer text: one JSON object a line."""
    return '\n'.join(json.dumps(call, ensure_ascii=False) for call in calls)
