"""Conversations about scenes, seeded and deterministic, in a training and a held-out split.

    python tools/planner/corpus.py --split heldout --seed 7 --count 3

prints conversations as JSON lines. Training conversations touch no held-out composition key in any
turn; each turn of a held-out conversation touches at least one. See README.md for the keys.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
import json
import random

from phrases import QUESTIONS, TEMPLATES, wrap
from tasks import held_out, plan, Ref, render_calls, Step
import words
from world import preposition, random_world, World

SIZES = ('small', 'medium', 'large', 'huge')
ACTIONS = {
    'bring_me': 10,
    'bring_person': 9,
    'move': 14,
    'pick': 9,
    'goto_place': 5,
    'goto_person': 4,
    'goto_me': 3,
    'pour': 6,
    'push': 4,
    'look': 4,
    'open': 4,
    'close': 4,
    'wipe': 4,
    'on': 3,
    'off': 3,
    'tell': 5,
    'say': 2,
    'wait': 3,
    'dock': 2,
    'follow': 2,
    'follow_me': 2,
}
ASKED = {'where': 8, 'where_person': 2, 'battery': 1, 'holding': 1, 'is_open': 2}
FAULTS = {'absent': 6, 'ambiguous': 3, 'no_place': 2, 'no_person': 2, 'off_domain': 2}
REFUSED = ('absent', 'ambiguous', 'no_place', 'no_person', 'battery')
NEEDS_OBJECT = (
    'bring_me',
    'bring_person',
    'move',
    'pick',
    'pour',
    'push',
    'on',
    'off',
    'where',
    'colour',
    'content',
)
NUMBERS = {1: 'one', 2: 'two', 3: 'three', 5: 'five', 10: 'ten', 20: 'twenty', 30: 'thirty'}


@dataclass
class Turn:
    """One exchange. `kind` is ok, question or the reason of a refusal; `steps` counts the tasks."""

    user: str
    answer: str
    kind: str
    keys: list[str]
    steps: int

    @property
    def novel(self) -> bool:
        return any(held_out(k) for k in self.keys)


@dataclass
class Conversation:
    system: str
    turns: list[Turn]
    size: str

    def messages(self) -> list[dict]:
        """Return the chat as role and content pairs, with the reference answers in it."""
        out = [{'role': 'system', 'content': self.system}]
        for turn in self.turns:
            out += [
                {'role': 'user', 'content': turn.user},
                {'role': 'assistant', 'content': turn.answer},
            ]
        return out


def clone(world: World) -> World:
    """Copy the mutable state; deepcopy is thirty times slower on a huge scene."""
    twin = copy.copy(world)
    twin.things = [copy.copy(t) for t in world.things]
    find = {id(old): new for old, new in zip(world.things, twin.things)}
    twin.held, twin.last = find.get(id(world.held)), find.get(id(world.last))
    twin.closed, twin.touched = dict(world.closed), set(world.touched)
    return twin


def pick_weighted(rng, table: dict[str, int]) -> str:
    return rng.choices(list(table), weights=table.values())[0]


def plural(kind: str) -> str:
    if kind == 'knife':
        return 'knives'
    return kind + ('es' if kind.endswith(('sh', 'x', 's')) else 's')


def make_ref(rng, world: World, thing) -> Ref | None:
    """Describe a thing so that it is the only match in the scene as it now is, or return None."""
    forms = ['kind', 'kind', 'colour', 'material', 'both', 'place']
    rng.shuffle(forms)
    if rng.random() < 0.5:
        forms.insert(0, 'kind')
    for form in forms:
        said = words.spoken_type(rng, thing.kind)
        ref = Ref(thing.kind, '')
        if form in ('colour', 'both'):
            ref.colour, said = thing.colour, f'{thing.colour} {said}'
        if form in ('material', 'both') and thing.material:
            ref.material = thing.material
            said = (
                said.replace(ref.colour, f'{ref.colour} {thing.material}', 1)
                if ref.colour
                else f'{thing.material} {said}'
            )
        if form == 'place':
            if thing.moved or thing.at in world.touched or not thing.at or thing.at in world.people:
                continue
            ref.place = thing.at
            said += f' {preposition(thing.at)} {words.spoken_place(rng, thing.at)}'
        if len(ref.matches(world)) == 1:
            ref.spoken = 'the ' + said
            return ref
    return None


def faulty_ref(rng, world: World, fault: str) -> Ref | None:
    """Describe something that is not there, or that two or three things match."""
    counts: dict[str, list] = {}
    for thing in world.things:
        counts.setdefault(thing.kind, []).append(thing)
    if fault == 'ambiguous':
        many = [k for k, v in counts.items() if len(v) > 1]
        if not many:
            return None
        kind = rng.choice(many)
        ref, said = Ref(kind, ''), words.spoken_type(rng, kind)
        if rng.random() < 0.35:
            ref.colour = rng.choice(counts[kind]).colour
            said = f'{ref.colour} {said}'
        ref.spoken = 'the ' + said
        return ref if len(ref.matches(world)) > 1 else None
    form = rng.choice(('kind', 'kind', 'colour'))
    if form == 'kind':
        missing = [k for k in words.TYPES if k not in counts]
        if not missing:
            return None
        kind = rng.choice(missing)
        ref, said = Ref(kind, ''), words.spoken_type(rng, kind)
        if rng.random() < 0.4:
            ref.colour = rng.choice(words.COLOURS)
            said = f'{ref.colour} {said}'
    else:
        kind = rng.choice(list(counts))
        ref, said = Ref(kind, ''), words.spoken_type(rng, kind)
        ref.colour = rng.choice(words.COLOURS)
        said = f'{ref.colour} {said}'
    ref.spoken = 'the ' + said
    return None if ref.matches(world) else ref


def choose_thing(rng, world: World, task: str):
    things = world.things
    if task == 'pour':
        things = [t for t in things if t.kind in words.POURERS]
    elif task in ('on', 'off'):
        things = [
            t for t in things if t.power is not None and (t.power != task or rng.random() < 0.2)
        ]
    elif task == 'content':
        things = [t for t in things if t.content is not None]
    return rng.choice(things) if things else None


def make_step(rng, world: World, task: str, fault: str = '', pronoun: bool = False) -> Step | None:
    """Draw one task with arguments that fit the world as it is at that moment."""
    table = QUESTIONS if task in QUESTIONS else TEMPLATES
    step = Step(task, rng.randrange(len(table[task])))
    look_at = rng.choice(('thing', 'thing', 'place', 'person')) if task == 'look' else ''
    if task in NEEDS_OBJECT or look_at == 'thing':
        if pronoun and (world.last or world.held):
            step.obj = Ref((world.last or world.held).kind, 'it', pronoun=True)
        elif fault in ('absent', 'ambiguous'):
            step.obj = faulty_ref(rng, world, fault)
        else:
            thing = choose_thing(rng, world, task)
            step.obj = make_ref(rng, world, thing) if thing else None
        if step.obj is None:
            return None
    if task == 'count':
        kind = rng.choice([t.kind for t in world.things] if rng.random() < 0.8 else words.TYPES)
        step.obj = Ref(kind, plural(kind))
    if task == 'pour':
        into = [t for t in world.things if t.kind in words.RECEIVERS and t is not world.held]
        if not into:
            return None
        step.other = make_ref(rng, world, rng.choice(into))
        if step.other is None:
            return None
    allowed = {
        'move': words.SURFACES + words.CONTAINERS,
        'goto_place': words.PLACES,
        'open': words.CONTAINERS,
        'close': words.CONTAINERS,
        'is_open': words.CONTAINERS,
        'wipe': words.SURFACES,
        'what_on': words.SURFACES + words.CONTAINERS,
    }.get(task)
    if look_at == 'place':
        allowed = words.PLACES
    if allowed:
        inside = fault != 'no_place'
        options = [p for p in allowed if (p in world.places) == inside]
        if task == 'what_on':
            options = [
                p
                for p in options
                if p not in world.touched and sum(t.at == p for t in world.things) <= 4
            ]
        if not options:
            return None
        step.place = rng.choice(options)
        step.spoken_place = words.spoken_place(rng, step.place)
    if (
        task in ('goto_person', 'bring_person', 'tell', 'follow', 'where_person')
        or look_at == 'person'
    ):
        step.person = (
            rng.choice(list(world.people)) if fault != 'no_person' else words.person_name(rng)
        )
    if task == 'push':
        step.spoken = rng.choice(list(words.DIRECTIONS))
        step.value = words.DIRECTIONS[step.spoken]
    elif task in ('tell', 'say'):
        step.value = step.spoken = rng.choice(words.MESSAGES if task == 'tell' else words.GREETINGS)
    elif task == 'wait':
        minutes = rng.random() < 0.35
        number = rng.choice((1, 2, 3, 5, 10) if minutes else (2, 3, 5, 10, 15, 20, 30, 45))
        step.value = number * 60 if minutes else number
        unit = ('minute' if minutes else 'second') + ('' if number == 1 else 's')
        step.spoken = (
            f'{NUMBERS[number] if number in NUMBERS and rng.random() < 0.5 else number} {unit}'
        )
    return step


def draw_steps(rng, world: World, count: int, fault: str) -> list[Step] | None:
    """Draw the steps of one instruction, each fitting the state that the former ones leave."""
    if fault == 'question':
        table = ASKED
        wrong = rng.choice(('', '', '', '', '', 'absent', 'no_person'))
        step = make_step(
            rng,
            world,
            pick_weighted(rng, table),
            wrong,
            pronoun=world.last is not None and rng.random() < 0.15,
        )
        return [step] if step else None
    future, steps = clone(world), []
    at_fault = rng.randrange(count) if fault else -1
    for i in range(count):
        pronoun = future.last is not None and rng.random() < (0.75 if i else 0.3)
        pronoun = pronoun or (
            future.held is not None and future.last is None and rng.random() < 0.3
        )
        task = pick_weighted(rng, ACTIONS)
        if pronoun and rng.random() < 0.7:
            task = rng.choice(('move', 'move', 'bring_me', 'bring_person'))
        elif future.held is not None and rng.random() < 0.6:
            task = rng.choice(('move', 'bring_me', 'bring_person', 'goto_place', 'goto_me'))
            pronoun = task in NEEDS_OBJECT
        if i and count > 1 and rng.random() < 0.1:
            task = 'goto_me'
        step = make_step(rng, future, task, fault if i == at_fault else '', pronoun)
        if step is None:
            return None
        steps.append(step)
        if i != at_fault:
            before = clone(future)
            if plan([step], future)[1] != 'ok':
                future = before
    return steps


def make_turn(rng, world: World, split: str, count: int) -> tuple[Turn, World]:
    """Draw until the turn fits the split; return it with the world that it leaves."""
    while True:
        roll = rng.random()
        fault = 'question' if roll < 0.12 else '' if roll < 0.84 else pick_weighted(rng, FAULTS)
        if fault == 'off_domain':
            if split == 'heldout':
                continue
            text = rng.choice(words.OFF_DOMAIN)
            reply = render_calls([{'skill': 'say', 'text': 'I can not help with that.'}])
            return Turn(wrap(rng, [text]), reply, 'off_domain', [], 1), world
        steps = draw_steps(rng, world, 1 if fault else count, fault)
        if not steps:
            continue
        keys = [k for step in steps for k in step.keys()]
        if any(held_out(k) for k in keys) != (split == 'heldout'):
            continue
        after = clone(world)
        calls, kind = plan(steps, after)
        if kind not in ('ok', 'question') and (kind not in REFUSED or len(steps) > 1):
            continue  # a refusal answers a single step, so that no plan needs to look ahead
        if len(calls) > 9:
            continue
        user = wrap(
            rng, [s.text() for s in steps], question=kind == 'question' or fault == 'question'
        )
        turn = Turn(user, render_calls(calls), kind, keys, len(steps))
        return turn, after if kind in ('ok', 'question') else world


def conversation(
    rng, split: str = 'train', size: str = 'medium', turns: int = 1, max_steps: int = 3
) -> Conversation:
    """Return one conversation. `split` is train or heldout."""
    world = random_world(rng, size)
    system, out = world.render(), []
    for _ in range(turns):
        count = min(max_steps, rng.choice((1, 1, 1, 2, 2)))
        turn, world = make_turn(rng, world, split, count)
        out.append(turn)
    return Conversation(system, out, size)


def sample(rng, split: str = 'train', progress: float = 1.0) -> Conversation:
    """
    Draw size and length as training does at `progress` (0 to 1).

    Looking a thing up has to be learnt before keeping track of what earlier turns changed, so it
    begins with one step in short scenes; everything is there from a quarter on.
    """
    if progress < 0.1:
        return conversation(rng, split, 'small', rng.choice((1, 2)), 1)
    weights = (50, 35, 14, 1.2) if progress > 0.25 else (70, 30, 4, 0)
    size = rng.choices(SIZES, weights=weights)[0]
    turns = rng.choice((1, 2, 2, 3, 3)) if size != 'huge' else rng.choice((3, 4, 5))
    return conversation(rng, split, size, turns, 3 if progress > 0.2 else 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--split', choices=('train', 'heldout'), default='train')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--count', type=int, default=5)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for _ in range(args.count):
        print(json.dumps(sample(rng, args.split).messages(), ensure_ascii=False))


if __name__ == '__main__':
    main()
