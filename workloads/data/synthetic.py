"""A synthetic twin of AdvertiseGen: the same shape and lengths, every word made up here.

AdvertiseGen pairs the attributes of a garment (``类型#裤*版型#宽松*风格#性感``) with a Chinese
advertisement. It may not be shipped, so this module makes sets like it from word lists and
sentence patterns: about nine attributes, 20 to 130 characters of input, 50 to 250 of output,
with the right-skewed lengths that such text has. Lengths drive cost; the prose does not matter,
and nobody should judge a model's quality on it. Each example depends on its seed and position
alone, so a longer set begins with the shorter one, on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from workloads.data.examples import Example
from workloads.data.texts import texts

DEFAULT_SEED = 20260101

_TEXTS = texts("synthetic")


def synthetic_examples(count: int, seed: int = DEFAULT_SEED) -> list[Example]:
    """``count`` made-up examples, each marked ``synthetic``; deterministic, prefix-stable."""
    return [_example(Random(seed * 1_000_003 + index)) for index in range(count)]


def pick(random: Random, values: Sequence[str]) -> str:
    """One of them, by one draw."""
    # Random.random() is the one method whose sequence Python guarantees across versions.
    return values[int(random.random() * len(values))]


def normal(random: Random) -> float:
    """About normally distributed, with mean 0 and deviation 1."""
    return sum(random.random() for _ in range(12)) - 6.0


def _example(random: Random) -> Example:
    garment = pick(random, tuple(_TEXTS["garments"]))
    attributes = _attributes(random, garment)
    content = "*".join(f"{key}#{value}" for key, value in attributes)
    return Example(
        content=content, summary=_advertisement(random, garment, attributes), synthetic=True
    )


def _attributes(random: Random, garment: str) -> list[tuple[str, str]]:
    """The kind of garment, then attributes in random order; a key may come twice, as in the
    real set."""
    wanted = min(20, max(4, round(9.2 * math.exp(0.32 * normal(random)))))
    known = _TEXTS["common"] | _TEXTS["garments"][garment]
    pool = [(key, value) for key, values in known.items() for value in values]
    chosen: list[tuple[str, str]] = [("类型", garment)]
    counts: dict[str, int] = {}
    while len(chosen) < wanted:
        key, value = pool.pop(int(random.random() * len(pool)))
        if counts.get(key, 0) < 2:
            counts[key] = counts.get(key, 0) + 1
            chosen.append((key, value))
    return chosen


def _advertisement(random: Random, garment: str, attributes: list[tuple[str, str]]) -> str:
    """Sentences about the attributes until a log-normal length is reached (median about 115)."""
    target = min(225.0, max(50.0, 100.0 * math.exp(0.36 * normal(random))))
    given = dict(attributes)
    details = tuple(value for key, value in attributes[1:] if key not in _TEXTS["common"])
    words = {
        "garment": next((v for k, v in attributes if k in ("裤型", "裙型", "衣样式")), garment),
        "color": given.get("颜色", "百搭颜色"),
        "style": given.get("风格", "简约"),
        "cut": given.get("版型", "合身"),
        "fabric": given.get("材质", "优质"),
        "pattern": given.get("图案", "纯色"),
        "season": pick(random, _TEXTS["seasons"]),
    }
    middles = list(_TEXTS["middles"])
    text = pick(random, _TEXTS["openings"]).format(**words)
    closing = pick(random, _TEXTS["closings"]).format(**words)
    while len(text) + len(closing) < target and middles:
        sentence = middles.pop(int(random.random() * len(middles)))
        text += sentence.format(**words, detail=pick(random, details) if details else "收腰")
    return text + closing
