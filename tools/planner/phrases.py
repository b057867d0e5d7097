"""How people say it: templates for each task, and the wrappings of spoken language.

Slots: {o} object, {q} second object, {p} place, {pp} preposition and place, {n} person,
{d} direction, {m} message, {t} duration. Every ordinary template is an imperative, so that any
opener fits it; templates that start with '!' are whole sentences and take no opener.
"""

TEMPLATES = {
    'goto_place': [
        'go to {p}',
        'drive to {p}',
        'move over to {p}',
        'head to {p}',
        'go over to {p}',
        'navigate to {p}',
        'make your way to {p}',
        'drive over to {p}',
        'get to {p}',
        'go and stand by {p}',
    ],
    'goto_person': [
        'go to {n}',
        'drive over to {n}',
        'go and see {n}',
        'head over to {n}',
        'move to {n}',
        'drive to {n}',
        'visit {n}',
    ],
    'goto_me': [
        'come here',
        'come to me',
        'come back to me',
        'come over here',
        'drive over to me',
        'get back to me',
        'return to me',
    ],
    'pick': [
        'pick up {o}',
        'grab {o}',
        'take {o}',
        'pick {o} up',
        'lift {o}',
        'collect {o}',
        'get hold of {o}',
        'grasp {o}',
        'take hold of {o}',
        'lift up {o}',
    ],
    'bring_me': [
        'bring me {o}',
        'fetch me {o}',
        'hand me {o}',
        'get me {o}',
        'pass me {o}',
        'bring {o} to me',
        'bring {o} over here',
        'give me {o}',
        'bring {o} here',
        'go and get me {o}',
        '!I need {o}',
        '!I would like {o}',
        '!may I have {o}',
        "!I'd love to have {o}",
    ],
    'bring_person': [
        'bring {o} to {n}',
        'take {o} to {n}',
        'give {o} to {n}',
        'hand {o} to {n}',
        'bring {n} {o}',
        'deliver {o} to {n}',
        'carry {o} over to {n}',
        'pass {o} to {n}',
        'get {n} {o}',
        '!{n} needs {o}',
        '!{n} would like {o}',
        'hand {n} {o}',
    ],
    'move': [
        'put {o} {pp}',
        'place {o} {pp}',
        'move {o} to {p}',
        'set {o} down {pp}',
        'carry {o} to {p}',
        'bring {o} to {p}',
        'take {o} to {p}',
        'leave {o} {pp}',
        'drop {o} off {pp}',
        'store {o} {pp}',
        'get {o} over to {p}',
        '!{o} belongs {pp}',
        '!{o} should go {pp}',
    ],
    'pour': [
        'pour {o} into {q}',
        'empty {o} into {q}',
        'fill {q} from {o}',
        'top up {q} from {o}',
        'pour what is in {o} into {q}',
        'tip {o} into {q}',
        'use {o} to fill {q}',
    ],
    'push': [
        'push {o} {d}',
        'slide {o} {d}',
        'nudge {o} {d}',
        'shove {o} {d}',
        'give {o} a push {d}',
    ],
    'look': [
        'look at {x}',
        'have a look at {x}',
        'check on {x}',
        'turn your camera to {x}',
        'point your camera at {x}',
        'take a look at {x}',
        'look over at {x}',
    ],
    'open': ['open {p}', 'open up {p}', 'pull {p} open', 'get {p} open', 'go and open {p}'],
    'close': ['close {p}', 'shut {p}', 'push {p} shut', 'go and close {p}', 'close up {p}'],
    'wipe': ['wipe {p}', 'clean {p}', 'wipe down {p}', 'give {p} a wipe', 'wipe {p} clean'],
    'on': ['switch on {o}', 'turn on {o}', 'turn {o} on', 'switch {o} on', 'start {o}'],
    'off': ['switch off {o}', 'turn off {o}', 'turn {o} off', 'switch {o} off', 'stop {o}'],
    'tell': [
        'tell {n} that {m}',
        'tell {n} {m}',
        'let {n} know that {m}',
        'let {n} know {m}',
        'go and tell {n} that {m}',
        'inform {n} that {m}',
    ],
    'say': ['say {m}', 'say {m} to everyone', 'just say {m}', 'say {m} loudly'],
    'wait': ['wait {t}', 'wait for {t}', 'hold on for {t}', 'pause for {t}', 'stay there for {t}'],
    'dock': [
        'go and charge',
        'go back to your dock',
        'dock',
        'return to the charger',
        'go and charge yourself',
        'drive back to the dock',
        'go to your charging station',
    ],
    'follow': ['follow {n}', 'go after {n}', 'stay with {n}', 'walk with {n}'],
    'follow_me': ['follow me', 'come with me', 'walk with me', 'stay with me'],
}

QUESTIONS = {
    'where': [
        'where is {o}',
        'where did you see {o}',
        'do you know where {o} is',
        'where can I find {o}',
        'have you seen {o}',
        'where did I leave {o}',
    ],
    'where_person': [
        'where is {n}',
        'where can I find {n}',
        'do you know where {n} is',
        'have you seen {n}',
    ],
    'what_on': [
        'what is {pp}',
        'what do you see {pp}',
        'tell me what is {pp}',
        'is there anything {pp}',
        'what have we got {pp}',
    ],
    'count': [
        'how many {o} are there',
        'how many {o} do you see',
        'count the {o}',
        'how many {o} have we got',
    ],
    'battery': [
        'how much battery do you have',
        'how is your battery',
        'what is your battery level',
        'how much charge is left',
        'is your battery full',
    ],
    'holding': [
        'what are you holding',
        'what is in your gripper',
        'is your gripper free',
        'do you have anything in your hand',
        'what have you got there',
    ],
    'is_open': [
        'is {p} open',
        'is {p} closed',
        'did someone open {p}',
        'do you know if {p} is open',
    ],
    'colour': ['what colour is {o}', 'which colour does {o} have', 'tell me the colour of {o}'],
    'content': ['is {o} empty', 'what is in {o}', 'is there anything in {o}', 'is {o} full'],
    'self': ['where are you', 'where are you right now', 'which place are you at'],
}

OPENERS = [
    '',
    '',
    '',
    '',
    'please ',
    'could you ',
    'can you ',
    'could you please ',
    'hey robot, ',
    'okay, ',
    'um, ',
    'well, ',
    'robot, ',
    'now ',
    'would you ',
    'will you please ',
    'alright, please ',
    'uh, can you ',
    'hello, could you ',
    'so, ',
    'hey, ',
    'er, please ',
    'go ahead and ',
    'I want you to ',
    'I need you to ',
    'be so kind and ',
]
SENTENCE_OPENERS = [
    '',
    '',
    '',
    'hey robot, ',
    'okay, ',
    'um, ',
    'well, ',
    'robot, ',
    'hey, ',
    'so, ',
]
CLOSERS = [
    '',
    '',
    '',
    '',
    ' please',
    ', please',
    ', thanks',
    ', thank you',
    ' now',
    ' when you can',
    ', will you',
    ' if you can',
]
JOINERS = [
    ' and then ',
    ' then ',
    ', then ',
    ', and then ',
    ' and ',
    ', after that ',
    ' and after that ',
    ', and ',
    ' and when that is done ',
]


def wrap(rng, parts: list[str], question: bool = False) -> str:
    """Join clauses into what a person would say, with or without capitals and full stop."""
    sentences = [p.startswith('!') for p in parts]
    parts = [p.lstrip('!') for p in parts]
    text = parts[0]
    for part in parts[1:]:
        text += rng.choice(JOINERS) + part
    opener = rng.choice(SENTENCE_OPENERS if sentences[0] or question else OPENERS)
    closer = rng.choice(CLOSERS) if rng.random() < 0.5 and not question else ''
    text = opener + text + closer
    if rng.random() < 0.35:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.45:
        asks = question or opener.strip().split(' ')[-1] in ('you',) and 'I ' not in opener
        text += '?' if asks else rng.choice('..!')
    return text
