"""Scenes and what the skills do to them.

A `World` is both the text of the system turn (`render`) and the state that the reference planner
updates while a conversation goes on. Only the initial state is ever rendered: later turns must
follow from the answers given so far, as they do on a robot that keeps one growing session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import words

LOW_BATTERY = 20


class Refusal(Exception):
    """The reference planner declines; `text` is what the robot says, `kind` the reason's name."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind, self.text = kind, text


@dataclass
class Thing:
    """An object: `at` is a place, a person's name, or '' while the gripper holds it."""

    name: str
    kind: str
    colour: str
    material: str
    at: str
    heavy: bool = False
    content: str | None = None  # '' is empty; None: no vessel
    power: str | None = None  # 'on' or 'off'; None: no switch
    moved: bool = False

    def line(self) -> str:
        """
        Describe the thing, its id last: there a causal model has read all that the id stands for.
        """
        parts = ['-', 'heavy' if self.heavy else '', self.colour, self.material, self.kind]
        if self.content is not None or self.power is not None:
            parts.append(f'({self.power or self.content or "empty"})')
        parts.append(f'{preposition(self.at)} {self.at}' if self.at else 'in gripper')
        return ' '.join(p for p in parts if p) + f': {self.name}'


def preposition(place: str) -> str:
    return 'in' if place in words.CONTAINERS else 'on'


@dataclass
class World:
    """One scene; `at` is the last place or person the robot drove to."""

    title: str
    places: list[str]
    closed: dict[str, bool]
    people: dict[str, str]
    speaker: str
    things: list[Thing]
    at: str
    battery: int
    held: Thing | None = None
    last: Thing | None = None
    touched: set[str] = field(default_factory=set)
    route: str = ''  # where the plan in work has driven to; every plan drives anew

    def render(self) -> str:
        """Return the system turn. The layout is part of what the model was trained on."""
        surfaces = [p for p in self.places if p in words.SURFACES]
        containers = [
            f'{p} ({"closed" if self.closed[p] else "open"})'
            for p in self.places
            if p in words.CONTAINERS
        ]
        spots = [p for p in self.places if p in words.SPOTS]
        people = [
            f'{n} at {p}' + (' (speaking)' if n == self.speaker else '')
            for n, p in self.people.items()
        ]
        gripper = f'holds {self.held.name}' if self.held else 'empty'
        lines = [
            f'scene: {self.title}',
            f'robot: at {self.at}, gripper {gripper}, battery {self.battery} %',
        ]
        for label, items in (
            ('surfaces', surfaces),
            ('containers', containers),
            ('spots', spots),
            ('people', people),
        ):
            if items:
                lines.append(f'{label}: ' + ', '.join(items))
        lines.append('objects:')
        lines += [t.line() for t in self.things]
        return '\n'.join(lines)
    # -- what the skills need and do; each returns the calls it adds -----------------------------
    def go(self, target: str) -> list[dict]:
        if self.route == target:
            return []
        self.at = self.route = target
        return [{'skill': 'navigate', 'to': target}]

    def reach(self, place: str) -> list[dict]:
        """Drive to a place and open it when it is closed."""
        calls = self.go(place)
        if self.closed.get(place):
            self.closed[place] = False
            calls.append({'skill': 'open', 'place': place})
        return calls

    def fetch(self, thing: Thing) -> list[dict]:
        """Have the thing in the gripper, or say why not."""
        if self.held is thing:
            return []
        if self.held is not None:
            raise Refusal('gripper', f'I am already holding {self.held.name}.')
        if thing.at in self.people:
            raise Refusal('has_it', f'{thing.at} has {thing.name}.')
        if thing.heavy:
            raise Refusal('heavy', f'{thing.name} is too heavy for me.')
        calls = self.reach(thing.at) + [{'skill': 'pick', 'object': thing.name}]
        self.touched.add(thing.at)
        thing.at, thing.moved, self.held = '', True, thing
        return calls

    def put(self, place: str) -> list[dict]:
        thing, calls = self.held, self.reach(place)
        calls.append({'skill': 'place', 'object': thing.name, preposition(place): place})
        self.touched.add(place)
        thing.at, self.held = place, None
        return calls

    def hand(self, person: str) -> list[dict]:
        thing, calls = self.held, self.go(person)
        calls.append({'skill': 'handover', 'object': thing.name, 'to': person})
        thing.at, self.held = person, None
        return calls


def random_world(rng, size: str = 'medium') -> World:
    """Return a scene; `size` is small, medium, large or huge (about 100, 300, 700, 2000 tokens)."""
    low, high = {'small': (3, 9), 'medium': (10, 26), 'large': (27, 48), 'huge': (120, 195)}[size]
    count = rng.randint(low, high)
    n_places = {'small': rng.randint(3, 7), 'medium': rng.randint(6, 12)}.get(
        size, rng.randint(9, 20)
    )
    places = rng.sample(words.PLACES, n_places)
    if not any(p in words.SURFACES for p in places):
        places.append(rng.choice(words.SURFACES))
    holders = [p for p in places if p not in words.SPOTS]
    names: list[str] = []
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        name = words.person_name(rng)
        if name not in names:
            names.append(name)
    world = World(
        title=rng.choice(words.TITLES),
        places=places,
        closed={p: rng.random() < 0.6 for p in places if p in words.CONTAINERS},
        people={n: rng.choice(places) for n in names},
        speaker=rng.choice(names),
        things=[],
        at=rng.choice(places + ['dock']),
        battery=rng.randint(3, 19) if rng.random() < 0.06 else rng.randint(20, 100),
    )
    used: set[str] = set()
    kinds: dict[str, int] = {}
    pool = rng.sample(
        words.TYPES, min(len(words.TYPES), max(3, int(count * rng.uniform(0.55, 0.95))))
    )
    while len(world.things) < count:
        kind = rng.choice(pool)
        if kinds.get(kind, 0) >= 3:
            pool = [k for k in pool if k != kind] or [k for k in words.TYPES if kinds.get(k, 0) < 3]
            continue
        name = f'{kind}_{rng.randint(1, 9)}'
        if name in used:
            continue
        used.add(name)
        kinds[kind] = kinds.get(kind, 0) + 1
        thing = Thing(name, kind, rng.choice(words.COLOURS), '', rng.choice(holders))
        options = words.material_of(kind)
        if options and rng.random() < 0.7:
            thing.material = rng.choice(options)
        thing.heavy = kind in words.CAN_BE_HEAVY and rng.random() < 0.4
        if kind in words.POURERS or kind in words.RECEIVERS:
            full = rng.random() < (0.7 if kind in words.POURERS else 0.3)
            thing.content = rng.choice(words.LIQUIDS) if full else ''
        if kind in words.SWITCHED:
            thing.power = rng.choice(('on', 'off'))
        world.things.append(thing)
    if rng.random() < 0.15:
        light = [t for t in world.things if not t.heavy]
        if light:
            world.held = rng.choice(light)
            world.held.at = ''
    return world
