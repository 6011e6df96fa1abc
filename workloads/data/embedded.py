"""Synthetic datasets; word lists and sentence patterns are in JSON files beside this module."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from random import Random
from typing import Any

from workloads.data.shapes import Example


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def pick(random: Random, values: Sequence[Any]) -> Any:
    """Draw one of them."""
    # Python guarantees only Random.random()'s sequence across versions.
    return values[int(random.random() * len(values))]


def take(random: Random, values: list[Any]) -> Any:
    """Draw one of them and remove it."""
    return values.pop(int(random.random() * len(values)))


def log_normal(random: Random, least: float, median: float, deviation: float, most: float) -> float:
    """Draw an approximately log-normal value, clipped to two limits."""
    normal = sum(random.random() for _ in range(12)) - 6.0
    return min(most, max(least, median * math.exp(deviation * normal)))


# A synthetic twin of AdvertiseGen, which may not be shipped: same shape and lengths.
#
# AdvertiseGen pairs garment attributes (``类型#裤*版型#宽松*风格#性感``) with a Chinese text.
# About nine attributes: 20 to 130 characters of input, 50 to 250 of output, right-skewed. Lengths
# determine cost; model quality cannot be judged on it. Each example depends on its seed and
# position alone, so a longer set begins with the shorter one, on every machine.

DEFAULT_SEED = 20260101

_TEXTS: dict[str, Any] = json.loads(_read("synthetic.json"))


def synthetic_examples(count: int, seed: int = DEFAULT_SEED) -> list[Example]:
    """Return ``count`` examples, all marked ``synthetic``; deterministic, prefix-stable."""
    return [_example(Random(seed * 1_000_003 + index)) for index in range(count)]


def _example(random: Random) -> Example:
    garment = pick(random, tuple(_TEXTS["garments"]))
    attributes = _attributes(random, garment)
    content = "*".join(f"{key}#{value}" for key, value in attributes)
    return Example(
        content=content, summary=_advertisement(random, garment, attributes), synthetic=True
    )


def _attributes(random: Random, garment: str) -> list[tuple[str, str]]:
    """Draw the garment, then attributes in random order; a key may repeat, as in the real set."""
    count = round(log_normal(random, 4, 9.2, 0.32, 20))
    known = _TEXTS["common"] | _TEXTS["garments"][garment]
    pool = [(key, value) for key, values in known.items() for value in values]
    chosen: list[tuple[str, str]] = [("类型", garment)]
    counts: dict[str, int] = {}
    while len(chosen) < count:
        key, value = take(random, pool)
        if counts.get(key, 0) < 2:
            counts[key] = counts.get(key, 0) + 1
            chosen.append((key, value))
    return chosen


def _advertisement(random: Random, garment: str, attributes: list[tuple[str, str]]) -> str:
    """Write sentences about the attributes up to a log-normal length (median about 115)."""
    target = log_normal(random, 50, 100, 0.36, 225)
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
        sentence = take(random, middles)
        text += sentence.format(**words, detail=pick(random, details) if details else "收腰")
    return text + closing


# A synthetic English corpus for pretraining: short articles about invented towns.
#
# An article keeps to its town, so that most masked words can be inferred and the loss falls. It
# depends on its seed and position alone. Model quality cannot be judged on it.

_CORPUS_SEED = 11

_CORPUS_TEXTS: dict[str, Any] = json.loads(_read("english_corpus.json"))

_GOODS = ("material", "makers", "work", "product")
_OPENING = "{town} is a town at {land}, about {number} hours on foot from {other}."


def english_articles(count: int) -> list[Example]:
    """Return ``count`` articles, all marked ``synthetic``; deterministic, prefix-stable."""
    return [_article(Random(_CORPUS_SEED * 1_000_003 + index)) for index in range(count)]


def _article(random: Random) -> Example:
    """Write an opening and five to fourteen sentences, each pattern at most once."""
    lists = _CORPUS_TEXTS
    goods = dict(zip(_GOODS, pick(random, lists["goods"]), strict=True))
    towns = {
        name: pick(random, lists["first"]) + pick(random, lists["last"])
        for name in ("town", "other")
    }
    kinds = {"land": "lands", "building": "buildings", "event": "events"}
    kinds |= {"birds": "birds", "trees": "trees"}
    words = towns | {word: pick(random, lists[name]) for word, name in kinds.items()} | goods
    patterns = list(lists["sentences"])
    count = 5 + int(random.random() * (len(patterns) - 4))
    text = [_OPENING.format(**words, number=pick(random, lists["numbers"]))]
    for _ in range(count):
        text.append(
            take(random, patterns).format(
                **words,
                number=pick(random, lists["numbers"]),
                month=pick(random, lists["months"]),
                name=pick(random, lists["names"]),
                person=pick(random, lists["people"]),
                year=1650 + int(random.random() * 350),
            )
        )
    return Example(content=" ".join(text), synthetic=True)


# A synthetic twin of CNN/DailyMail: news articles with highlights of three or four sentences.
#
# Articles have 250 to 1,400 words, right-skewed, highlights 35 to 70. Lengths determine cost;
# summaries cannot be judged on it. Each example depends on its seed and position alone, so a longer
# set begins with the shorter one, on every machine.

_NEWS_SEED = 20261123

#: "themes" have event, change, decider and cost. The tokenizer of tiny-t5 has all these words.
_NEWS_TEXTS: dict[str, Any] = json.loads(_read("articles.json"))


def news_examples(count: int) -> list[Example]:
    """Return ``count`` articles, all marked ``synthetic``; deterministic, prefix-stable."""
    return [_news_example(Random(_NEWS_SEED * 1_000_003 + index)) for index in range(count)]


def _news_example(random: Random) -> Example:
    words = _words(random)
    target = log_normal(random, 250, 560, 0.42, 1400)
    paragraphs = [_filled(pick(random, _NEWS_TEXTS["leads"]), words)]
    written, left = 0, list(_NEWS_TEXTS["body"])
    while written < target:
        left = left or list(_NEWS_TEXTS["body"])  # a long report repeats patterns
        sentences = []
        for _ in range(2 + int(random.random() * 3)):
            if left:
                pattern = take(random, left)
                sentences.append(_filled(pattern, words | _of_sentence(random)))
        paragraphs.append(" ".join(sentences))
        written += len(paragraphs[-1].split())
    summary = "\n".join(_filled(pattern, words) for pattern in _NEWS_TEXTS["highlights"])
    return Example(content="\n\n".join(paragraphs), summary=summary, synthetic=True)


def _words(random: Random) -> dict[str, str]:
    theme = pick(random, _NEWS_TEXTS["themes"])
    facts = {name: pick(random, values) for name, values in theme.items()}
    numbers = {
        "n": str(12 + int(random.random() * 80)),
        "m": str(3 + int(random.random() * 190)),
        "h": str(2 + int(random.random() * 6)),
    }
    return {
        **{name: text.format(**numbers, y="{y}") for name, text in facts.items()},
        **numbers,
        "town": pick(random, _NEWS_TEXTS["towns"]),
        "person": _name(random),
        "month": pick(random, _NEWS_TEXTS["months"]),
        **_of_sentence(random),
    }


def _of_sentence(random: Random) -> dict[str, str]:
    return {
        "other": _name(random),
        "rival": pick(random, _NEWS_TEXTS["towns"]),
        "day": pick(random, _NEWS_TEXTS["days"]),
        "y": str(2 + int(random.random() * 18)),
        "s": str(20 + int(random.random() * 400)),
    }


def _name(random: Random) -> str:
    return " ".join(pick(random, _NEWS_TEXTS[name]) for name in ("first", "last"))


def _filled(pattern: str, words: dict[str, str]) -> str:
    text = pattern.format(**words)
    if "{" in text:  # a fact that holds a number of years
        text = text.format(**words)
    return text[0].upper() + text[1:]


# Prompts in the public domain, as far as their authors can make them so. The first image prompt is
# that of optimum-habana's example, for comparison. The English ones are 32 requests to an
# assistant, up to about 300 words: uniform prompts would say little about serving.

IMAGE_PROMPTS = tuple(_read("image_prompts.txt").splitlines())
ENGLISH_PROMPTS = tuple(_read("english_prompts.txt").splitlines())
