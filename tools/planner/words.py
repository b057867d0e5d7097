"""The closed vocabulary of the planner's world.

Object types, places and attributes are a fixed list; people's names are open (see `person_name`),
so that copying a name needs copying, not recall. Everything here was written for this corpus.
"""

COLOURS = ('red blue green yellow white black orange purple pink grey brown silver').split()
MATERIALS = ('ceramic plastic wooden metal paper cotton woollen leather rubber steel').split()
LIQUIDS = 'water tea milk juice coffee soup'.split()
DIRECTIONS = {
    'to the left': 'left',
    'to the right': 'right',
    'forward': 'forward',
    'back': 'back',
    'a bit to the left': 'left',
    'a bit to the right': 'right',
    'away from you': 'forward',
    'towards you': 'back',
}

# Vessels that one can pour from, vessels that one can pour into, things with a switch, the rest.
POURERS = 'kettle teapot bottle jug carton thermos'.split()
RECEIVERS = 'mug cup bowl tumbler pot vase bucket'.split()
SWITCHED = 'lamp radio fan heater drill speaker'.split()
OTHERS = (
    'plate fork spoon knife pan jar can tray sponge towel cloth napkin apple banana lemon pear '
    'bread cheese book magazine newspaper letter pen pencil notebook phone remote tablet clock '
    'candle basket box bag pillow blanket slipper hat scarf umbrella pillbox thermometer hammer '
    'screwdriver wrench saw bolt gear cable toolbox tape ruler brush crate doll ball puzzle '
    'chair suitcase'
).split()
TYPES = POURERS + RECEIVERS + SWITCHED + OTHERS
# Too heavy for the gripper when the scene says so.
CAN_BE_HEAVY = 'toolbox crate chair suitcase bucket heater box basket'.split()

SURFACES = (
    'counter table shelf desk sofa bed windowsill workbench sideboard nightstand bench stove '
    'trolley rack dining_table coffee_table bookshelf'
).split()
CONTAINERS = 'fridge oven cupboard drawer dishwasher cabinet wardrobe locker bin'.split()
SPOTS = 'door window hallway lift balcony garden entrance stairs café terrace'.split()
PLACES = SURFACES + CONTAINERS + SPOTS

# What people say for a name in the scene, besides the name itself.
SPOKEN = {
    'sofa': ['couch'],
    'fridge': ['refrigerator'],
    'lift': ['elevator'],
    'bin': ['trash can'],
    'phone': ['mobile'],
    'remote': ['remote control'],
    'counter': ['kitchen counter'],
    'hallway': ['corridor'],
    'stove': ['cooker'],
    'wrench': ['spanner'],
    'cable': ['wire'],
    'pillow': ['cushion'],
    'entrance': ['front door'],
}

NAMES = (
    'Zoë Łukasz Anna Ben Clara David Emma Farid Grace Hugo Ines Jonas Karim Lena Marco Nora Omar '
    'Paula Quinn Rosa Samir Tara Uma Viktor Wanda Yuki Renée Jürgen Søren Chloé José Anaïs Björn '
    'Nuño Zdeněk Şule Ngọc Aoife Óscar Françoise Miloš Agnieszka'
).split()
_HEADS = (
    'Ka La Mi No Ro Su Te Va We Yo Zi Be Da El Fa Gu Ha Il Jo Ne Pa Ri Sa To Čá Đo Ēr Ży Ša Ño Ül '
    'Ćo Åk Øy Ét Ła'
).split()
_TAILS = (
    'ra lin mo na vik to dé né lá ša ří ko ber di fan gül hü jan ķe lo mir ñez ön pe rik sé tů '
    'wen yan zé ña ß ło ść ğan õl'
).split()

MESSAGES = (
    'dinner is ready|tea is ready|the doctor is here|the taxi has arrived|it is time for lunch|'
    'the meeting starts soon|the parcel is here|it is raining|the bus is late|'
    'breakfast is served|we are leaving|the music is too loud|the film starts now|'
    'someone is at the door|the soup is hot|visitors are coming|the lesson is over|'
    'the floor is wet'
).split('|')
GREETINGS = (
    'hello|good morning|good night|welcome|thank you|happy birthday|goodbye|'
    'good evening|well done|see you later'
).split('|')
OFF_DOMAIN = (
    'tell me a joke|what is the weather like|sing a song|book a flight to Paris|order a pizza|'
    'call my mother|play chess with me|do my homework|who won the match|fly to the moon|'
    'translate this into French|what time is it|paint the wall|buy some milk|'
    'write a poem|what is the capital of Spain|cut my hair|wash the car|walk the dog|'
    'how old are you|send an email to my boss|drive me to work|repair the roof|'
    'what do you think about politics|teach me to dance|add these numbers'
).split('|')
TITLES = (
    'kitchen|workshop|care home|office|living room|lab|hotel|school|flat|clinic|library|'
    'warehouse|studio|house'
).split('|')


def person_name(rng):
    """Return a name; one in five is made up, so copying cannot rely on known names."""
    if rng.random() < 0.8:
        return rng.choice(NAMES)
    return rng.choice(_HEADS) + ''.join(rng.choice(_TAILS) for _ in range(rng.choice((1, 1, 2))))


def material_of(kind):
    """Return the materials that a type may have: fruit has none, cloth is cloth."""
    if kind in ('apple', 'banana', 'lemon', 'pear', 'bread', 'cheese', 'candle'):
        return ()
    if kind in ('towel', 'cloth', 'napkin', 'blanket', 'scarf', 'pillow', 'hat', 'slipper', 'doll'):
        return (
            ('cotton', 'woollen', 'leather')
            if kind in ('hat', 'slipper')
            else ('cotton', 'woollen')
        )
    if kind in ('book', 'magazine', 'newspaper', 'letter', 'notebook', 'carton'):
        return ('paper',)
    if kind in ('phone', 'remote', 'tablet', 'radio', 'speaker', 'drill', 'clock'):
        return ('plastic', 'metal')
    return ('ceramic', 'plastic', 'wooden', 'metal', 'rubber', 'steel')


def spoken_place(rng, place):
    """Return how a speaker names a place: 'the dining table', now and then a synonym."""
    options = SPOKEN.get(place)
    word = rng.choice(options) if options and rng.random() < 0.2 else place.replace('_', ' ')
    return 'the ' + word


def spoken_type(rng, kind):
    """Return how a speaker names an object type."""
    options = SPOKEN.get(kind)
    return rng.choice(options) if options and rng.random() < 0.15 else kind
