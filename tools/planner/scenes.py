"""Write the example scenes that the demo uses; the answers come from the reference planner.

    python tools/planner/scenes.py --out flashrt_ros/assets/planner/scenes

`evaluate.py --scenes` then says whether a model gives exactly these answers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import random

from corpus import clone
from tasks import plan, Ref, render_calls, Step
from world import random_world, Thing, World


def _thing(text: str) -> Thing:
    """Read 'mug_2 red ceramic @shelf [tea]'; '-' stands for no material."""
    name, colour, material, at, *rest = text.split()
    note = rest[0] if rest else None
    return Thing(
        name,
        name.split('_')[0],
        colour,
        '' if material == '-' else material,
        at[1:],
        heavy=note == 'heavy',
        power=note if note in ('on', 'off') else None,
        content=None if note in (None, 'heavy', 'on', 'off') else note.replace('empty', ''),
    )


def kitchen():
    world = World(
        'kitchen',
        ['counter', 'fridge', 'dining_table', 'cupboard', 'shelf', 'door'],
        {'fridge': True, 'cupboard': False},
        {'Zoë': 'dining_table', 'Łukasz': 'door'},
        'Zoë',
        [
            _thing(t)
            for t in (
                'mug_2 red ceramic @shelf empty',
                'mug_5 blue ceramic @fridge milk',
                'kettle_1 silver steel @counter water',
                'bowl_3 white ceramic @counter empty',
                'apple_4 green - @dining_table',
                'pan_7 black steel @cupboard',
                'sponge_6 yellow - @counter',
                'bread_8 brown - @cupboard',
            )
        ],
        'counter',
        76,
    )
    return world, [
        (
            'could you bring me the blue mug please?',
            [Step('bring_me', obj=Ref('mug', '', colour='blue'))],
        ),
        (
            'put the red mug on the counter, then come back to me',
            [Step('move', obj=Ref('mug', '', colour='red'), place='counter'), Step('goto_me')],
        ),
        ('where is the pan?', [Step('where', obj=Ref('pan', ''))]),
        (
            'please pour the kettle into the bowl',
            [Step('pour', obj=Ref('kettle', ''), other=Ref('bowl', ''))],
        ),
        ('bring me the teapot', [Step('bring_me', obj=Ref('teapot', ''))]),
        (
            'tell Łukasz that dinner is ready',
            [Step('tell', person='Łukasz', value='dinner is ready')],
        ),
    ]


def workshop():
    world = World(
        'workshop',
        ['workbench', 'rack', 'cabinet', 'drawer', 'bench', 'entrance'],
        {'cabinet': True, 'drawer': False},
        {'Marco': 'workbench', 'Renée': 'bench'},
        'Marco',
        [
            _thing(t)
            for t in (
                'drill_3 orange plastic @cabinet off',
                'hammer_1 red steel @rack',
                'hammer_6 black wooden @bench',
                'wrench_2 silver steel @drawer',
                'toolbox_5 blue metal @rack heavy',
                'tape_9 yellow - @workbench',
                'saw_4 green metal @rack',
                'lamp_7 white metal @workbench off',
            )
        ],
        'entrance',
        58,
    )
    return world, [
        ('hand me the wrench', [Step('bring_me', obj=Ref('wrench', ''))]),
        ('pick up the hammer', [Step('pick', obj=Ref('hammer', ''))]),
        (
            'okay, take the black hammer to Renée',
            [Step('bring_person', obj=Ref('hammer', '', colour='black'), person='Renée')],
        ),
        (
            'turn on the lamp, then put the saw in the cabinet',
            [Step('on', obj=Ref('lamp', '')), Step('move', obj=Ref('saw', ''), place='cabinet')],
        ),
        ('bring me the kettle', [Step('bring_me', obj=Ref('kettle', ''))]),
        ('how much battery do you have?', [Step('battery')]),
    ]


def care_home():
    world = World(
        'care home',
        ['bed', 'nightstand', 'wardrobe', 'table', 'window', 'hallway'],
        {'wardrobe': True},
        {'Agnieszka': 'bed', 'José': 'hallway'},
        'Agnieszka',
        [
            _thing(t)
            for t in (
                'pillbox_2 white plastic @nightstand',
                'blanket_4 grey woollen @wardrobe',
                'blanket_7 pink cotton @bed',
                'tumbler_1 blue plastic @table empty',
                'bottle_3 green plastic @table water',
                'radio_5 brown plastic @nightstand on',
                'book_8 red paper @table',
                'slipper_6 purple leather @wardrobe',
            )
        ],
        'hallway',
        91,
    )
    return world, [
        (
            'I would like the grey blanket',
            [Step('bring_me', obj=Ref('blanket', '', colour='grey'))],
        ),
        (
            'could you please pour the bottle into the tumbler',
            [Step('pour', obj=Ref('bottle', ''), other=Ref('tumbler', ''))],
        ),
        (
            'put it on the table and then switch off the radio',
            [
                Step('move', obj=Ref('bottle', 'it', pronoun=True), place='table'),
                Step('off', obj=Ref('radio', '')),
            ],
        ),
        ('where is José?', [Step('where_person', person='José')]),
        ('take the book to José', [Step('bring_person', obj=Ref('book', ''), person='José')]),
    ]


def warehouse_long():
    """A long prefix: some 160 objects, about 1,800 tokens."""
    world = random_world(random.Random('warehouse'), 'huge')
    world.title, world.battery, world.held = 'warehouse', 64, None
    for thing in world.things:
        thing.at = thing.at or next(iter(world.closed), world.places[0])
    single = [
        t
        for t in world.things
        if sum(o.kind == t.kind for o in world.things) == 1 and not t.heavy and t.at != world.at
    ]
    first, second, third = single[:3]
    names = list(world.people)
    return world, [
        (f'bring me the {first.kind}', [Step('bring_me', obj=Ref(first.kind, ''))]),
        (f'where is the {second.kind}?', [Step('where', obj=Ref(second.kind, ''))]),
        (
            f'please take the {third.kind} to {names[-1]}',
            [Step('bring_person', obj=Ref(third.kind, ''), person=names[-1])],
        ),
        ('follow me', [Step('follow_me')]),
    ]


SCENES = {f.__name__: f for f in (kitchen, workshop, care_home, warehouse_long)}


def build(name: str) -> dict:
    """
    Return one scene as the demo reads it: one growing conversation, each answer the reference's.
    """
    world, script = SCENES[name]()
    out = {'title': world.title, 'scene': world.render(), 'instructions': []}
    for user, steps in script:
        after = clone(world)
        calls, kind = plan(steps, after)
        out['instructions'].append({'user': user, 'answer': render_calls(calls), 'kind': kind})
        world = after if kind in ('ok', 'question') else world
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--out', type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in SCENES:
        (args.out / f'{name}.json').write_text(
            json.dumps(build(name), ensure_ascii=False, indent=1) + '\n'
        )


if __name__ == '__main__':
    main()
