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
from workloads.data.texts import texts

SEED = 11

_TEXTS = texts("english_corpus")

_OPENING = "{town} is a town at {land}, about {number} hours on foot from {other}."


def corpus(count: int) -> list[Example]:
    """``count`` made-up articles, each marked ``synthetic``; deterministic, prefix-stable."""
    return [_article(Random(SEED * 1_000_003 + index)) for index in range(count)]


def _article(random: Random) -> Example:
    """An opening and five to fourteen sentences, each pattern at most once."""
    material, makers, work, product = _TEXTS["goods"][int(random.random() * len(_TEXTS["goods"]))]
    kept = {
        "town": pick(random, _TEXTS["first"]) + pick(random, _TEXTS["last"]),
        "other": pick(random, _TEXTS["first"]) + pick(random, _TEXTS["last"]),
        "land": pick(random, _TEXTS["lands"]),
        "building": pick(random, _TEXTS["buildings"]),
        "event": pick(random, _TEXTS["events"]),
        "birds": pick(random, _TEXTS["birds"]),
        "trees": pick(random, _TEXTS["trees"]),
        "material": material,
        "makers": makers,
        "work": work,
        "product": product,
    }
    patterns = list(_TEXTS["sentences"])
    wanted = 5 + int(random.random() * (len(patterns) - 4))
    text = [_OPENING.format(**kept, number=pick(random, _TEXTS["numbers"]))]
    for _ in range(wanted):
        pattern = patterns.pop(int(random.random() * len(patterns)))
        text.append(
            pattern.format(
                **kept,
                number=pick(random, _TEXTS["numbers"]),
                month=pick(random, _TEXTS["months"]),
                name=pick(random, _TEXTS["names"]),
                person=pick(random, _TEXTS["people"]),
                year=1650 + int(random.random() * 350),
            )
        )
    return Example(content=" ".join(text), synthetic=True)
