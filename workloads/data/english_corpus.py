"""A synthetic English corpus: plain text for pretraining, every sentence made up here.

Short articles about invented towns: where each lies, what its people make, what happened there,
what a visitor sees. A sentence is a pattern filled from word lists, and an article keeps to its
town, so that most masked words can be told from the text around them and a loss falls. Nobody
should judge a model by it. An article depends on its seed and position alone.
"""

from __future__ import annotations

from random import Random

from workloads.data.examples import Example
from workloads.data.synthetic import pick

SEED = 11

_FIRST = ("Alder", "Barrow", "Cold", "Dun", "East", "Fair", "Glen", "Hart", "Iron", "Kings")
_LAST = ("brook", "bury", "field", "ford", "haven", "mere", "moor", "stead", "ton", "wick")
_LANDS = (
    "a wide valley",
    "the northern coast",
    "the foot of the hills",
    "a bend of the river",
    "an old forest",
    "the edge of the plain",
    "a chain of small lakes",
    "the western islands",
)
_GOODS = (
    ("wool", "weavers", "spin and dye it", "cloth"),
    ("timber", "carpenters", "saw and plane it", "furniture"),
    ("clay", "potters", "shape and fire it", "bowls"),
    ("iron", "smiths", "heat and hammer it", "tools"),
    ("milk", "farmers", "salt and ripen it", "cheese"),
    ("glass", "blowers", "melt and blow it", "lamps"),
    ("leather", "saddlers", "cut and stitch it", "harness"),
    ("barley", "millers", "dry and grind it", "flour"),
)
_BUILDINGS = ("bridge", "market hall", "school", "mill", "harbour", "tower", "library", "station")
_EVENTS = ("flood", "fire", "hard winter", "dry summer", "long war", "great storm", "poor harvest")
_PEOPLE = ("teacher", "captain", "doctor", "mayor", "painter", "engineer", "gardener", "printer")
_NAMES = ("Ada", "Bruno", "Clara", "David", "Edith", "Felix", "Greta", "Hugo", "Ida", "Jonas")
_BIRDS = ("herons", "swallows", "owls", "geese", "larks", "cranes")
_TREES = ("oaks", "birches", "willows", "pines", "chestnuts", "limes")
_MONTHS = ("January", "March", "April", "June", "August", "September", "October", "December")
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve")

_OPENING = "{town} is a town at {land}, about {number} hours on foot from {other}."
_SENTENCES = (
    "For more than {number} hundred years the {makers} of {town} have bought {material} in the "
    "villages around and have worked on it in small shops behind their houses.",
    "They {work} by hand, and what they make of it, mostly {product}, is sold at the market "
    "in {month}.",
    "The {building} was built in {year}, after a {event} had taken the old one away.",
    "When the {event} of {year} was over, the people of {town} and {other} met in the {building} "
    "and agreed to help each other.",
    "{name}, a {person} from {other}, came here as a child and wrote down what the old people "
    "remembered.",
    "In spring the {birds} come back to the meadows, and the {trees} along the road to {other} "
    "turn green within {number} days.",
    "A visitor who has only one day should see the {building} first, then walk up to the {trees} "
    "above the town and look down at {land}.",
    "The price of {material} rose in {year}, so that many {makers} closed their shops and looked "
    "for work in {other}.",
    "Today {number} of the old shops are open again, and young {makers} learn there how to "
    "{work} as it was done before.",
    "If the weather is clear, {other} can be seen from the {building}, and at night its lights "
    "shine over the water.",
    "Because {town} has no river of its own, its {product} had to be carried to the boats at "
    "{other}, which took {number} hours.",
    "{name} became {person} of the town in {year} and had {number} {trees} planted beside the "
    "{building}.",
    "It is said that nobody in {town} sells {product} on a day on which the {birds} are silent.",
    "The school has {number} rooms, and in each of them hangs a picture of the {event} that "
    "changed the town.",
)


def corpus(count: int) -> list[Example]:
    """``count`` made-up articles, each marked ``synthetic``; deterministic, prefix-stable."""
    return [_article(Random(SEED * 1_000_003 + index)) for index in range(count)]


def _article(random: Random) -> Example:
    """An opening and five to fourteen sentences, each pattern at most once."""
    material, makers, work, product = _GOODS[int(random.random() * len(_GOODS))]
    kept = {
        "town": pick(random, _FIRST) + pick(random, _LAST),
        "other": pick(random, _FIRST) + pick(random, _LAST),
        "land": pick(random, _LANDS),
        "building": pick(random, _BUILDINGS),
        "event": pick(random, _EVENTS),
        "birds": pick(random, _BIRDS),
        "trees": pick(random, _TREES),
        "material": material,
        "makers": makers,
        "work": work,
        "product": product,
    }
    patterns = list(_SENTENCES)
    wanted = 5 + int(random.random() * (len(patterns) - 4))
    text = [_OPENING.format(**kept, number=pick(random, _NUMBERS))]
    for _ in range(wanted):
        pattern = patterns.pop(int(random.random() * len(patterns)))
        text.append(
            pattern.format(
                **kept,
                number=pick(random, _NUMBERS),
                month=pick(random, _MONTHS),
                name=pick(random, _NAMES),
                person=pick(random, _PEOPLE),
                year=1650 + int(random.random() * 350),
            )
        )
    return Example(content=" ".join(text), synthetic=True)
