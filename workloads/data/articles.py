"""A synthetic twin of CNN/DailyMail: news articles with highlights, every word made up here.

CNN/DailyMail pairs an article of some 700 words with three or four sentences that sum it up. This
module writes sets like it from word lists and sentence patterns: right-skewed lengths of 250 to
1,400 words, and highlights of 35 to 70 words that say what the article says. Places and people do
not exist. Lengths drive cost; nobody should judge a model's summaries on it. Each example depends
on its seed and position alone, so a longer set begins with the shorter one, on every machine.
"""

from __future__ import annotations

import math
import re
from random import Random

from workloads.data.examples import Example
from workloads.data.synthetic import normal, pick
from workloads.data.texts import texts

SEED = 20261123

#: "themes" have the event, the change, who decides, what it costs or counts; "elsewhere" has words
#: of prompts, for the vocabulary that is made of this module's words.
_TEXTS = texts("articles")
_WORD = re.compile(r"[A-Za-z]+(?:[-'][A-Za-z]+)*")
_FIELD = re.compile(r"\{\w+\}")


def article_examples(count: int) -> list[Example]:
    """``count`` made-up articles, each marked ``synthetic``; deterministic, prefix-stable."""
    return [_example(Random(SEED * 1_000_003 + index)) for index in range(count)]


def words_used() -> list[str]:
    """Every word, number and mark that an article may hold, in alphabetical order."""
    facts = [text for theme in _TEXTS["themes"] for texts in theme.values() for text in texts]
    others = [text for name, listed in _TEXTS.items() if name != "themes" for text in listed]
    found: set[str] = set()
    for text in (*facts, *others):
        for word in _WORD.findall(_FIELD.sub(" ", text)):
            found |= {word, word[0].upper() + word[1:]}
    return sorted(found | {str(number) for number in range(420)})


def _example(random: Random) -> Example:
    words = _words(random)
    target = min(1400.0, max(250.0, 560.0 * math.exp(0.42 * normal(random))))
    paragraphs = [_filled(pick(random, _TEXTS["leads"]), words)]
    written, left = 0, list(_TEXTS["body"])
    while written < target:
        left = left or list(_TEXTS["body"])  # a long report comes back to what it has said
        sentences = []
        for _ in range(2 + int(random.random() * 3)):
            if left:
                pattern = left.pop(int(random.random() * len(left)))
                sentences.append(_filled(pattern, words | _of_sentence(random)))
        paragraphs.append(" ".join(sentences))
        written += len(paragraphs[-1].split())
    summary = "\n".join(_filled(pattern, words) for pattern in _TEXTS["highlights"])
    return Example(content="\n\n".join(paragraphs), summary=summary, synthetic=True)


def _words(random: Random) -> dict[str, str]:
    """The facts of one article."""
    theme = _TEXTS["themes"][int(random.random() * len(_TEXTS["themes"]))]
    facts = {name: pick(random, values) for name, values in theme.items()}
    numbers = {
        "n": str(12 + int(random.random() * 80)),
        "m": str(3 + int(random.random() * 190)),
        "h": str(2 + int(random.random() * 6)),
    }
    return {
        **{name: text.format(**numbers, y="{y}") for name, text in facts.items()},
        **numbers,
        "town": pick(random, _TEXTS["towns"]),
        "person": _name(random),
        "month": pick(random, _TEXTS["months"]),
        **_of_sentence(random),
    }


def _of_sentence(random: Random) -> dict[str, str]:
    """Words that change from sentence to sentence."""
    return {
        "other": _name(random),
        "rival": pick(random, _TEXTS["towns"]),
        "day": pick(random, _TEXTS["days"]),
        "y": str(2 + int(random.random() * 18)),
        "s": str(20 + int(random.random() * 400)),
    }


def _name(random: Random) -> str:
    return " ".join(pick(random, _TEXTS[name]) for name in ("first", "last"))


def _filled(pattern: str, words: dict[str, str]) -> str:
    text = pattern.format(**words)
    if "{" in text:  # a fact that holds a number of years
        text = text.format(**words)
    return text[0].upper() + text[1:]
