"""Loads of a server: which requests arrive, and when. Pure; randomness follows seed and salt.

A *closed loop* keeps ``concurrency`` requests in flight: the next is sent when one has ended, so a
slow server is asked less. An *open loop* sends at planned times whatever the server does, as users
do; above the server's capacity its queue grows for as long as the load lasts.

An input of *n* tokens means that the server counts n tokens of prompt. Prompts of random tokens
are sent as token ids, so nothing is tokenised again, no special token is added, and n holds
exactly. Other tools send the *text* of random tokens, whose tokens are counted anew by the server
and are a few percent more or fewer (``traces.py`` has the differences by tool).
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from workloads.base import BadConfiguration

if TYPE_CHECKING:
    import numpy as np

    from workloads.data.shapes import Example

#: A text, token ids, or the messages of a chat (``role`` and ``content``).
Prompt = str | tuple[int, ...] | tuple[Mapping[str, str], ...]

Kind = Literal["fixed", "uniform", "normal", "lognormal"]
Pattern = Literal["poisson", "constant", "gamma", "bursts", "ramp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request, and its time in seconds from the load's start."""

    prompt: Prompt
    output_tokens: int  # most that are generated; exactly so many with ``ignore_eos``
    input_tokens: int | None = None  # of the prompt; None: only the server counts them
    at_s: float | None = None  # None: not known yet, or a closed loop sends it in turn
    after: int | None = None  # position of the request whose end it waits for: a chat's last turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The requests of a load in order, and how many a closed loop keeps in flight."""

    requests: tuple[Planned, ...]
    concurrency: int | None = None  # None: an open loop


# ---------------------------------------------------------------- lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of lengths in tokens; draws are whole numbers of at least 1."""

    kind: Kind
    first: float  # the length, the least, the mean or the median
    second: float = 0.0  # the largest, the standard deviation, or that of the logarithm

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        """Return ``count`` lengths."""
        if self.kind == "fixed":
            return [int(self.first)] * count
        values: np.ndarray
        if self.kind == "uniform":
            values = random.integers(int(self.first), int(self.second) + 1, count)
        elif self.kind == "normal":
            values = random.normal(self.first, self.second, count)
        else:
            values = random.lognormal(math.log(self.first), self.second, count)
        return [max(1, round(float(value))) for value in values]


_NUMBER = r"\s*(\d+\.?\d*|\.\d+)\s*"
_LENGTHS = re.compile(rf"(uniform|normal|lognormal)\({_NUMBER},{_NUMBER}\)")
LENGTHS_HELP = (
    "a number of tokens, uniform(least, largest), normal(mean, deviation), or lognormal(median, "
    "deviation of the logarithm)"
)


def parse_lengths(text: int | str) -> Lengths:
    """Read ``512``, ``uniform(800, 1024)``, ``normal(512, 100)`` or ``lognormal(512, 0.8)``; raises
    BadConfiguration for anything else."""
    plain = str(text).strip()
    if plain.isdecimal() and int(plain) >= 1:
        return Lengths(kind="fixed", first=int(plain))
    match = _LENGTHS.fullmatch(plain)
    numbers = [float(number) for number in match.groups()[1:]] if match else [0.0]
    if match is None or numbers[0] < 1:
        raise BadConfiguration(f"{plain!r} is no length; write {LENGTHS_HELP}")
    kind: Any = match.group(1)
    if kind == "uniform" and numbers[1] < numbers[0]:
        raise BadConfiguration(f"{plain}: the largest length is below the least")
    return Lengths(kind=kind, first=numbers[0], second=numbers[1])


# ---------------------------------------------------------------- requests


def random_requests(
    count: int,
    inputs: Lengths,
    outputs: Lengths,
    vocabulary: int,
    *,
    turns: int = 1,
    seed: int = 0,
    salt: str = "",
    shared_prefix: int = 0,
    special: Iterable[int] = (),
) -> list[Planned]:
    """Requests whose prompts are random token ids, so that no cached prefix helps but the shared.

    ``count`` are conversations. Of one turn, ``inputs`` are whole prompts, never shorter than the
    ``shared_prefix`` + 1. Of several, each turn adds ``inputs`` tokens, and its prompt is the whole
    conversation before it. What stands for earlier answers is drawn too, so that prompts do not
    depend on the engine. Turns are dealt out in rounds: round by round, each waits for the last.

    Ids are drawn uniformly from ``range(vocabulary)`` without the ``special`` ones, such as those
    of end-of-sequence and of images. Another ``salt`` draws other ids of the same lengths.
    """
    import numpy  # lazy: plans read this file

    allowed = numpy.setdiff1d(numpy.arange(vocabulary), numpy.fromiter(special, dtype=int))
    if not len(allowed):
        raise BadConfiguration(f"a vocabulary of {vocabulary} tokens leaves none to draw")
    random = generator(seed, f"tokens{salt}")

    def ids(length: int) -> tuple[int, ...]:
        return tuple(allowed[random.integers(0, len(allowed), length)].tolist())

    added = inputs.draw(count * turns, generator(seed, "inputs"))
    answers = outputs.draw(count * turns, generator(seed, "outputs"))
    histories = [ids(shared_prefix)] * count
    requests = []
    for number, answer in enumerate(answers):
        chat = number % count
        length = added[number] if turns > 1 else max(1, added[number] - shared_prefix)
        prompt = histories[chat] + ids(length)
        if turns > 1:
            histories[chat] = prompt + ids(answer)
        requests.append(
            Planned(
                prompt=prompt,
                input_tokens=len(prompt),
                output_tokens=answer,
                after=number - count if number >= count else None,
            )
        )
    return requests


def dataset_requests(
    examples: Sequence[Example],
    count: int,
    output_tokens: Lengths,
    *,
    chat: bool = True,
    seed: int = 0,
) -> list[Planned]:
    """Requests from a dataset's prompts, in its order and from its start again where it is shorter.

    ``chat``: send messages, with earlier turns; else texts, joined.
    """
    answers = output_tokens.draw(count, generator(seed, "outputs"))
    requests = []
    for example, answer in zip(itertools.cycle(examples), answers, strict=False):
        messages = [{"role": turn.role, "content": turn.text} for turn in example.earlier]
        if example.content:
            messages.append({"role": "user", "content": example.content})
        text = "\n".join(message["content"] for message in messages)
        requests.append(Planned(prompt=tuple(messages) if chat else text, output_tokens=answer))
    return requests


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for each purpose: drawing more of one changes none of the others."""
    import numpy  # lazy: plans read this file

    return numpy.random.default_rng([seed, zlib.crc32(purpose.encode())])


# ---------------------------------------------------------------- times


def parse_pattern(text: str) -> tuple[Pattern, float]:
    """Read ``poisson``, ``constant``, ``gamma(shape)``, ``bursts(size)`` or ``ramp(start rate)``;
    raises BadConfiguration for anything else."""
    match = re.fullmatch(rf"(\w+)(?:\({_NUMBER}\))?", text.strip())
    name, number = match.groups() if match else ("", None)
    with_number = name in ("gamma", "bursts", "ramp")
    value = float(number or 0)
    if name in get_args(Pattern) and (value > 0 if with_number else number is None):
        pattern: Any = name
        return pattern, value
    raise BadConfiguration(
        f"{text!r} is no pattern of arrivals; write poisson, constant, gamma(0.5) for gaps that "
        "vary more than Poisson's (below 1) or less, bursts(8) for eight at once, or ramp(1) for a "
        "rate that grows from 1 a second to request_rate"
    )


def arrival_times(count: int, rate: float, pattern: str = "poisson", seed: int = 0) -> list[float]:
    """Return ``count`` times in seconds from the load's start, in order, at ``rate`` (above 0) a
    second.

    ``poisson``: gaps are exponential. ``gamma(k)``: gaps are gamma of shape k and the same mean, k
    = 1 being Poisson (vLLM's burstiness). ``bursts(n)``: n at once, the bursts Poisson at rate /
    n. ``ramp(r)``: Poisson whose rate grows linearly from r to ``rate`` over the load.
    """
    name, number = parse_pattern(pattern)
    random = generator(seed, "times")
    if name == "constant":
        return [position / rate for position in range(count)]
    if name == "bursts":
        size = max(1, int(number))
        bursts = list(itertools.accumulate(random.exponential(size / rate, -(-count // size))))
        return [float(bursts[position // size]) for position in range(count)]
    if name == "gamma":
        gaps = random.gamma(number, 1 / (rate * number), count)
    else:
        gaps = random.exponential(1 / rate, count)
    times = [float(time) for time in itertools.accumulate(gaps)]
    return list(_ramp(times, number / rate)) if name == "ramp" and count else times


def _ramp(times: Sequence[float], start: float) -> Iterator[float]:
    """Stretch times of a constant rate so that it grows from ``start`` times it to the whole.

    With n = rate × t expected arrivals of the constant rate, and the ramp's rate (s + (1 - s) t/T)
    × rate, T = 2 × the constant load's duration / (1 + s); t solves the quadratic equation.
    """
    if math.isclose(start, 1):
        yield from times
        return
    total = 2 * times[-1] / (1 + start)
    slope = (1 - start) / total
    for time in times:
        yield (-start + math.sqrt(max(0.0, start**2 + 2 * slope * time))) / slope


def schedule(
    requests: Sequence[Planned],
    *,
    concurrency: int | None = None,
    request_rate: float | None = None,
    arrivals: str = "poisson",
    seed: int = 0,
) -> Schedule:
    """Give requests their times: a closed loop, else an open loop at a rate, else a trace's own."""
    times: Sequence[float | None] = [None if concurrency else one.at_s for one in requests]
    if request_rate is not None:
        times = arrival_times(len(requests), request_rate, arrivals, seed)
    timed = (replace(one, at_s=at_s) for one, at_s in zip(requests, times, strict=True))
    return Schedule(concurrency=concurrency, requests=tuple(timed))
