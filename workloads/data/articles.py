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

SEED = 20261123

_TOWNS: tuple[str, ...] = ("Ashbourne", "Bellmere", "Carrow", "Dunhaven", "Eastwick", "Farleigh")
_TOWNS += ("Greyport", "Harrowgate", "Inverlee", "Kingsmoor", "Lowfield", "Marston", "Oakham")
_FIRST = ("Anna", "Brian", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "James")
_LAST = ("Abbott", "Bennett", "Cole", "Dawson", "Ellis", "Foster", "Grant", "Hughes", "Irving")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "March", "April", "June", "July", "September", "October", "November")

#: The event, what changed, who decides, and what it costs or counts.
_THEMES: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "event": ("a new tram line", "a bridge over the river", "a ring road", "night buses"),
        "change": ("cut the journey to the harbour to {n} minutes", "carry {n},000 people a day"),
        "office": ("the council's transport committee", "the regional transport board"),
        "role": ("transport officer", "engineer in charge", "committee chair"),
        "cost": ("{m} million pounds", "{m} million pounds over {y} years"),
        "worry": ("noise at night", "the loss of parking places", "roadworks in the summer"),
    },
    {
        "event": ("a children's hospital", "a walk-in clinic", "a centre for eye surgery"),
        "change": ("treat {n},000 patients a year", "shorten the waiting list by {n} per cent"),
        "office": ("the health trust", "the county health board"),
        "role": ("head nurse", "chief surgeon", "director of the trust"),
        "cost": ("{m} million pounds", "{m} million pounds, half of it from donations"),
        "worry": ("a shortage of nurses", "the long way from the villages", "the price of parking"),
    },
    {
        "event": ("a wind farm off the coast", "a solar park", "a plant for heat pumps"),
        "change": ("supply {n},000 homes with power", "create {n} jobs in the town"),
        "office": ("the planning inspectorate", "the county council"),
        "role": ("site manager", "energy adviser", "spokeswoman for the company"),
        "cost": ("{m} million pounds", "{m} million pounds of private money"),
        "worry": ("birds on their way south", "the view from the cliffs", "lorries in the lanes"),
    },
    {
        "event": ("a school of music", "a library with a roof garden", "a museum of the sea"),
        "change": ("welcome {n},000 visitors a year", "offer {n} courses free of charge"),
        "office": ("the arts council", "the town's committee for culture"),
        "role": ("head librarian", "director of music", "curator"),
        "cost": ("{m} million pounds", "{m} million pounds from the lottery"),
        "worry": ("empty shops nearby", "the cost of heating", "too few evening buses"),
    },
)
_LEADS = (
    "{town} is to get {event}, {office} decided on {day} after a debate of {h} hours.",
    "After {y} years of planning, {office} has agreed to build {event} in {town}.",
    "Work on {event} in {town} will begin in {month}, {office} said on {day}.",
)
_BODY = (
    "{person}, the {role}, said that it would {change}.",
    "The plan costs {cost}, and the first stone is to be laid in {month}.",
    "Not everyone is pleased: many who live nearby fear {worry}.",
    "More than {s} letters reached {office}, most of them about {worry}.",
    '"We have listened, and we have changed the plan twice," said {person}.',
    "The old building on the site, empty for {y} years, will be taken down first.",
    "A study of last {month} had found that the town needed something of the kind.",
    '"People have waited for this since I was at school," said {other}, who keeps a shop there.',
    "In the market place on {day} opinions were divided, and nobody was short of one.",
    "{other} has lived in the street for {y} years and will look at the drawings again this week.",
    "The drawings can be seen in the town hall until the end of {month}.",
    "Three firms want the work; a decision between them is expected before {month}.",
    "A similar scheme in {rival} was finished a year late and cost a third more than was planned.",
    "{person} promised that the lessons of {rival} had been learned.",
    "The money will come in {y} parts, each tied to what has been done by then.",
    "For the time of the works, the road between the station and the square will be closed.",
    "Buses will take another way, and the stop at the church will move by a hundred yards.",
    "The schools have been told, and the timetable will change after the holidays.",
    "Figures that {office} published on {day} show how much has changed in ten years.",
    "The number of people who live in the town has grown by {n} in every thousand since then.",
    "Rents have risen as well, which {other} called the real question behind the debate.",
    '"It is a good plan in the wrong place," {other} told the meeting to some applause.',
    "An earlier plan had failed by two votes, when the rain kept several members at home.",
    "This time {s} people came to listen, and chairs had to be brought from the school.",
    "The vote was taken late in the evening, and the result was clear.",
    "Those who lost said that they would accept it and would watch the costs.",
    "The mayor spoke for ten minutes, thanked everybody, and did not mention {worry}.",
    "Trees that have to go will be replaced, two for each, along the river.",
    "A group of pupils had counted the traffic for a week and brought their table with them.",
    "Their table agreed with the experts' to within one part in fifty, {person} said.",
)
#: Words of prompts, for the vocabulary that is made of this module's words.
_ELSEWHERE = ("summarize", "what is who how why write a list explain name give me some")
_WORD = re.compile(r"[A-Za-z]+(?:[-'][A-Za-z]+)*")
_FIELD = re.compile(r"\{\w+\}")
_HIGHLIGHTS = (
    "{office} agrees to {event} in {town} .",
    "It is to {change} and costs {cost} .",
    "{person}, the {role}, says that work will begin in {month} .",
    "People who live nearby fear {worry} .",
)


def article_examples(count: int) -> list[Example]:
    """``count`` made-up articles, each marked ``synthetic``; deterministic, prefix-stable."""
    return [_example(Random(SEED * 1_000_003 + index)) for index in range(count)]


def words_used() -> list[str]:
    """Every word, number and mark that an article may hold, in alphabetical order."""
    facts = [text for theme in _THEMES for texts in theme.values() for text in texts]
    names = (*_TOWNS, *_FIRST, *_LAST, *_DAYS, *_MONTHS)
    patterns = (*_LEADS, *_BODY, *_HIGHLIGHTS, *facts, *names, *_ELSEWHERE)
    found: set[str] = set()
    for text in patterns:
        for word in _WORD.findall(_FIELD.sub(" ", text)):
            found |= {word, word[0].upper() + word[1:]}
    return sorted(found | {str(number) for number in range(420)})


def _example(random: Random) -> Example:
    words = _words(random)
    target = min(1400.0, max(250.0, 560.0 * math.exp(0.42 * normal(random))))
    paragraphs = [_filled(pick(random, _LEADS), words)]
    written, left = 0, list(_BODY)
    while written < target:
        left = left or list(_BODY)  # a long report comes back to what it has said
        sentences = []
        for _ in range(2 + int(random.random() * 3)):
            if left:
                pattern = left.pop(int(random.random() * len(left)))
                sentences.append(_filled(pattern, words | _of_sentence(random)))
        paragraphs.append(" ".join(sentences))
        written += len(paragraphs[-1].split())
    summary = "\n".join(_filled(pattern, words) for pattern in _HIGHLIGHTS)
    return Example(content="\n\n".join(paragraphs), summary=summary, synthetic=True)


def _words(random: Random) -> dict[str, str]:
    """The facts of one article."""
    theme = _THEMES[int(random.random() * len(_THEMES))]
    facts = {name: pick(random, values) for name, values in theme.items()}
    numbers = {
        "n": str(12 + int(random.random() * 80)),
        "m": str(3 + int(random.random() * 190)),
        "h": str(2 + int(random.random() * 6)),
    }
    return {
        **{name: text.format(**numbers, y="{y}") for name, text in facts.items()},
        **numbers,
        "town": pick(random, _TOWNS),
        "person": _name(random),
        "month": pick(random, _MONTHS),
        **_of_sentence(random),
    }


def _of_sentence(random: Random) -> dict[str, str]:
    """Words that change from sentence to sentence."""
    return {
        "other": _name(random),
        "rival": pick(random, _TOWNS),
        "day": pick(random, _DAYS),
        "y": str(2 + int(random.random() * 18)),
        "s": str(20 + int(random.random() * 400)),
    }


def _name(random: Random) -> str:
    return f"{pick(random, _FIRST)} {pick(random, _LAST)}"


def _filled(pattern: str, words: dict[str, str]) -> str:
    text = pattern.format(**words)
    if "{" in text:  # a fact that holds a number of years
        text = text.format(**words)
    return text[0].upper() + text[1:]
