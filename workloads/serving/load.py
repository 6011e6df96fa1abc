"""Loads of a server: which requests arrive, and when. Pure; everything random follows a seed.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """A request without its time."""

    prompt: Prompt
    output_tokens: int  # most that are generated; exactly so many with ``ignore_eos``
    input_tokens: int | None = None  # of the prompt; None: only the server counts them
    at_s: float | None = None  # of a recorded trace
    after: int | None = None  # position of the request whose end it waits for: a chat's last turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request and its time."""

    index: int
    at_s: float | None  # seconds from the load's start; None: a closed loop sends it in turn
    prompt: Prompt
    output_tokens: int
    input_tokens: int | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The arrivals of a load, in order of index, and the requests in flight of a closed loop."""

    arrivals: tuple[Arrival, ...]
    concurrency: int | None = None  # None: an open loop

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise BadConfiguration(f"concurrency {self.concurrency}; at least 1 is needed")
        if self.concurrency is None and any(arrival.at_s is None for arrival in self.arrivals):
            raise BadConfiguration("an open loop needs the time of every arrival")
        for position, arrival in enumerate(self.arrivals):
            if arrival.index != position:
                raise ValueError(f"arrival {position} has the index {arrival.index}")
            if arrival.after is not None and not 0 <= arrival.after < position:
                raise ValueError(
                    f"arrival {position} waits for {arrival.after}, not an earlier one"
                )


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


_LENGTHS = re.compile(r"(uniform|normal|lognormal)\(\s*([\d.]+)\s*,\s*([\d.]+)\s*\)")
LENGTHS_HELP = (
    "a number of tokens, uniform(least, largest), normal(mean, deviation), or lognormal(median, "
    "deviation of the logarithm)"
)


def parse_lengths(text: int | str) -> Lengths:
    """Read ``512``, ``uniform(800, 1024)``, ``normal(512, 100)`` or ``lognormal(512, 0.8)``.

    Raises:
        BadConfiguration: it is none of these, or the numbers cannot be lengths.
    """
    plain = str(text).strip()
    if plain.isdecimal() and int(plain) >= 1:
        return Lengths(kind="fixed", first=int(plain))
    match = _LENGTHS.fullmatch(plain)
    numbers = [float(number) for number in match.groups()[1:]] if match and _numbers(match) else []
    if match is None or not numbers or numbers[0] < 1:
        raise BadConfiguration(f"{plain!r} is no length; write {LENGTHS_HELP}")
    kind: Any = match.group(1)
    if kind == "uniform" and numbers[1] < numbers[0]:
        raise BadConfiguration(f"{plain}: the largest length is below the least")
    return Lengths(kind=kind, first=numbers[0], second=numbers[1])


def _numbers(match: re.Match[str]) -> bool:
    return all(number.count(".") <= 1 and number != "." for number in match.groups()[1:])


# ---------------------------------------------------------------- requests


def random_requests(
    count: int,
    inputs: Lengths,
    outputs: Lengths,
    vocabulary: int,
    *,
    seed: int = 0,
    shared_prefix: int = 0,
    prefixes: int = 1,
    special: Iterable[int] = (),
) -> list[Planned]:
    """Requests whose prompts are random token ids, so that no cached prefix helps but the shared.

    Args:
        count: of requests.
        inputs, outputs: lengths in tokens; a prompt is never shorter than its shared prefix + 1.
        vocabulary: ids are drawn uniformly from ``range(vocabulary)``.
        shared_prefix: tokens at the start of each prompt that others have too, as a system prompt.
        prefixes: different ones among which the requests are dealt out in turn.
        special: ids that are never drawn, such as those of end-of-sequence and of images.
    """
    ids = _drawer(vocabulary, special, generator(seed, "tokens"))
    lengths = inputs.draw(count, generator(seed, "inputs"))
    answers = outputs.draw(count, generator(seed, "outputs"))
    starts = [ids(shared_prefix) for _ in range(prefixes if shared_prefix else 1)]
    requests = []
    for number, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        start = starts[number % len(starts)]
        prompt = start + ids(max(1, length - len(start)))
        requests.append(Planned(prompt=prompt, input_tokens=len(prompt), output_tokens=answer))
    return requests


def random_chats(
    count: int,
    turns: int,
    inputs: Lengths,
    outputs: Lengths,
    vocabulary: int,
    *,
    seed: int = 0,
    shared_prefix: int = 0,
    special: Iterable[int] = (),
) -> list[Planned]:
    """Conversations of random token ids: each turn's prompt is the whole conversation before it.

    What stands for earlier answers is drawn too, so that every engine reads the same prompts. The
    turns of all conversations are dealt out in rounds: round by round, each waits for the last.

    Args:
        count: of conversations; ``count * turns`` requests are returned.
        inputs: tokens that a turn adds.
        outputs: tokens of an answer.
        shared_prefix: tokens at the start of every conversation: a system prompt.
    """
    ids = _drawer(vocabulary, special, generator(seed, "tokens"))
    added = inputs.draw(count * turns, generator(seed, "inputs"))
    answers = outputs.draw(count * turns, generator(seed, "outputs"))
    histories = [ids(shared_prefix)] * count
    requests = []
    for number in range(count * turns):
        chat = number % count
        prompt = histories[chat] + ids(added[number])
        histories[chat] = prompt + ids(answers[number])
        requests.append(
            Planned(
                prompt=prompt,
                input_tokens=len(prompt),
                output_tokens=answers[number],
                after=number - count if number >= count else None,
            )
        )
    return requests


def dataset_requests(
    examples: Sequence[Example],
    count: int,
    output_tokens: Lengths | None,
    count_tokens: Callable[[str], int] | None = None,
    *,
    chat: bool = True,
    seed: int = 0,
) -> list[Planned]:
    """Requests from a dataset's prompts, in its order and from its start again where it is shorter.

    Args:
        output_tokens: lengths of answers; None: each example's own answer, which
            ``count_tokens`` counts.
        chat: send messages, with earlier turns; else texts, joined.

    Raises:
        BadConfiguration: an example has no answer to take the length from.
    """
    if output_tokens is not None:
        answers: Iterable[int] = output_tokens.draw(count, generator(seed, "outputs"))
    elif count_tokens is None or not all(example.summary for example in examples[:count]):
        raise BadConfiguration("the dataset has no answers whose length could be asked for")
    else:
        answers = itertools.cycle([count_tokens(example.summary) for example in examples[:count]])
    return [
        Planned(prompt=_prompt(example, chat), output_tokens=max(1, answer))
        for example, answer in zip(
            itertools.islice(itertools.cycle(examples), count), answers, strict=False
        )
    ]


def _prompt(example: Example, chat: bool) -> Prompt:
    turns = [(turn.role, turn.text) for turn in example.earlier]
    if example.content:
        turns.append(("user", example.content))
    if chat:
        return tuple({"role": role, "content": text} for role, text in turns)
    return "\n".join(text for _, text in turns)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for each purpose: drawing more of one changes none of the others."""
    import numpy  # lazy: plans read this file

    return numpy.random.default_rng([seed, zlib.crc32(purpose.encode())])


def _drawer(
    vocabulary: int, special: Iterable[int], random: np.random.Generator
) -> Callable[[int], tuple[int, ...]]:
    """Return a function that draws so many ids."""
    import numpy  # lazy: plans read this file

    allowed = numpy.setdiff1d(numpy.arange(vocabulary), numpy.fromiter(special, dtype=int))
    if not len(allowed):
        raise BadConfiguration(f"a vocabulary of {vocabulary} tokens leaves none to draw")
    return lambda count: tuple(allowed[random.integers(0, len(allowed), count)].tolist())


# ---------------------------------------------------------------- times


def parse_pattern(text: str) -> tuple[Pattern, float]:
    """Read ``poisson``, ``constant``, ``gamma(shape)``, ``bursts(size)`` or ``ramp(start rate)``.

    Raises:
        BadConfiguration: it is none of these.
    """
    match = re.fullmatch(r"(\w+)(?:\(\s*([\d.]+)\s*\))?", text.strip())
    name, number = match.groups() if match else ("", None)
    with_number = name in ("gamma", "bursts", "ramp")
    if name in get_args(Pattern) and (number is not None) is with_number:
        try:
            value = float(number or 0)
        except ValueError:
            value = 0.0
        if value > 0 or not with_number:
            pattern: Any = name
            return pattern, value
    raise BadConfiguration(
        f"{text!r} is no pattern of arrivals; write poisson, constant, gamma(0.5) for gaps that "
        "vary more than Poisson's (below 1) or less, bursts(8) for eight at once, or ramp(1) for a "
        "rate that grows from 1 a second to request_rate"
    )


def arrival_times(count: int, rate: float, pattern: str = "poisson", seed: int = 0) -> list[float]:
    """Return ``count`` times in seconds from the load's start, in order, at ``rate`` a second.

    ``poisson``: gaps are exponential. ``gamma(k)``: gaps are gamma of shape k and the same mean, k
    = 1 being Poisson (vLLM's burstiness). ``bursts(n)``: n at once, the bursts Poisson at rate /
    n. ``ramp(r)``: Poisson whose rate grows linearly from r to ``rate`` over the load.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise BadConfiguration(f"request_rate {rate:g}; it must be above 0")
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
    """Give requests their times: a closed loop, an open loop at a rate, or a trace's own times.

    Raises:
        BadConfiguration: both or neither are given, and the requests have no times of their own.
    """
    if concurrency is not None and request_rate is not None:
        raise BadConfiguration(
            "concurrency and request_rate exclude each other: one load, one loop"
        )
    times: Sequence[float | None]
    if concurrency is not None:
        times = [None] * len(requests)
    elif request_rate is not None:
        times = arrival_times(len(requests), request_rate, arrivals, seed)
    else:
        times = [request.at_s for request in requests]
        if None in times:
            raise BadConfiguration(
                "write concurrency (a closed loop) or request_rate (an open one); only recorded "
                "traces have times of their own"
            )
    return Schedule(
        concurrency=concurrency,
        arrivals=tuple(
            Arrival(
                index=index,
                at_s=at_s,
                prompt=request.prompt,
                output_tokens=request.output_tokens,
                input_tokens=request.input_tokens,
                after=request.after,
            )
            for index, (request, at_s) in enumerate(zip(requests, times, strict=True))
        ),
    )


def scaled(requests: Sequence[Planned], speed: float) -> list[Planned]:
    """Return a trace's requests ``speed`` times as fast; BadConfiguration unless it is above 0."""
    if not speed > 0:
        raise BadConfiguration(f"a trace cannot be replayed at {speed:g} times its speed")
    return [replace(r, at_s=None if r.at_s is None else r.at_s / speed) for r in requests]
