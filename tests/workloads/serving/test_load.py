"""Loads: lengths, prompts and times, by hand and by laws."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.base import BadConfiguration
from workloads.data.shapes import Example, Turn
from workloads.serving.load import (
    Lengths,
    arrival_times,
    dataset_requests,
    generator,
    parse_lengths,
    parse_pattern,
    random_requests,
)

TEN = Lengths(kind="fixed", first=10)


def drawn(text: str, count: int = 4000) -> list[int]:
    return parse_lengths(text).draw(count, generator(0, "test"))


def test_lengths_have_the_distribution_that_their_text_names() -> None:
    assert drawn("512", 3) == [512] * 3
    uniform = drawn("uniform(800, 1024)")
    assert (min(uniform), max(uniform)) == (800, 1024)
    assert statistics.mean(uniform) == pytest.approx(912, rel=0.01)
    normal = drawn("normal(500, 50)")
    assert statistics.mean(normal) == pytest.approx(500, rel=0.01)
    assert statistics.stdev(normal) == pytest.approx(50, rel=0.05)
    assert statistics.median(drawn("lognormal(300, 0.8)")) == pytest.approx(300, rel=0.05)
    assert min(drawn("normal(2, 50)")) == 1


@pytest.mark.parametrize(
    "text",
    ["0", "-4", "", "long", "uniform(9, 3)", "uniform(0, 3)", "normal(5)", "normal(1.2.3, 4)"],
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(BadConfiguration):
        parse_lengths(text)


@given(
    count=st.integers(1, 20),
    length=st.integers(1, 30),
    prefix=st.integers(0, 40),
    seed=st.integers(0, 5),
)
def test_random_prompts_share_their_prefix_and_nothing_else(
    count: int, length: int, prefix: int, seed: int
) -> None:
    lengths = Lengths(kind="fixed", first=length)
    settings: dict[str, Any] = {"seed": seed, "shared_prefix": prefix}
    requests = random_requests(count, lengths, TEN, 1000, special={0, 7}, **settings)
    assert requests == random_requests(count, lengths, TEN, 1000, special={0, 7}, **settings)
    for request in requests:
        assert request.input_tokens == len(request.prompt) == max(length, prefix + 1)
        assert not {0, 7} & set(request.prompt) and max(request.prompt) < 1000
        assert request.prompt[:prefix] == requests[0].prompt[:prefix]


def test_another_seed_changes_prompts_and_a_longer_answer_does_not() -> None:
    first = random_requests(5, TEN, TEN, 1000, seed=1)
    longer = random_requests(5, TEN, Lengths(kind="fixed", first=99), 1000, seed=1)
    assert [r.prompt for r in first] == [r.prompt for r in longer]
    assert first != random_requests(5, TEN, TEN, 1000, seed=2)


def test_a_vocabulary_of_special_tokens_alone_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="leaves none"):
        random_requests(1, TEN, TEN, 2, special={0, 1})


def test_a_turn_repeats_its_conversation_and_comes_after_the_turn_before() -> None:
    answers = Lengths(kind="fixed", first=5)
    requests = random_requests(3, TEN, answers, 500, turns=4, shared_prefix=20)
    assert len(requests) == 12 and len({r.prompt[:20] for r in requests}) == 1
    for number, request in enumerate(requests):
        turn = number // 3
        assert request.after == (number - 3 if turn else None)
        assert len(request.prompt) == 20 + 10 * (turn + 1) + 5 * turn
        if turn:
            before = requests[number - 3].prompt
            assert request.prompt[: len(before)] == before


def test_dataset_prompts_are_messages_or_texts() -> None:
    examples = [
        Example(content="and now?", earlier=(Turn(role="user", text="hi"),)),
        Example(content="one"),
    ]
    chat = dataset_requests(examples, 3, TEN)
    assert chat[0].prompt == (
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "and now?"},
    )
    assert [r.output_tokens for r in chat] == [10] * 3 and chat[2].prompt == chat[0].prompt
    text = dataset_requests(examples, 2, TEN, chat=False)
    assert [r.prompt for r in text] == ["hi\nand now?", "one"]


@pytest.mark.parametrize("pattern", ["poisson", "constant", "gamma(0.5)", "gamma(4)", "bursts(8)"])
def test_arrivals_have_the_rate(pattern: str) -> None:
    times = arrival_times(8000, 20.0, pattern)
    assert times == sorted(times) and times[0] >= 0
    assert times[-1] == pytest.approx(400, rel=0.06)


def test_patterns_differ_in_the_spread_of_their_gaps() -> None:
    def spread(pattern: str) -> float:
        gaps = [b - a for a, b in itertools.pairwise(arrival_times(8000, 1.0, pattern))]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    assert spread("constant") == pytest.approx(0, abs=1e-6)
    assert spread("poisson") == pytest.approx(1, rel=0.05)
    assert spread("gamma(0.25)") == pytest.approx(2, rel=0.1)
    assert spread("gamma(4)") == pytest.approx(0.5, rel=0.05)


def test_bursts_come_at_once() -> None:
    times = arrival_times(20, 4.0, "bursts(8)")
    assert [len(list(group)) for _, group in itertools.groupby(times)] == [8, 8, 4]


def test_a_ramp_grows_from_one_rate_to_the_other() -> None:
    times = arrival_times(22_000, 10.0, "ramp(1)")
    total = times[-1]
    assert total == pytest.approx(22_000 / 5.5, rel=0.05)
    tenths = [sum(1 for t in times if n / 10 <= t / total < (n + 1) / 10) for n in range(10)]
    rates = [count / (total / 10) for count in tenths]
    assert rates == pytest.approx([1 + 9 * (n + 0.5) / 10 for n in range(10)], rel=0.15)
    assert arrival_times(3, 5.0, "ramp(5)") == arrival_times(3, 5.0, "poisson")


@pytest.mark.parametrize("text", ["", "often", "gamma", "gamma(0)", "poisson(3)", "ramp(.)"])
def test_other_patterns_are_refused(text: str) -> None:
    with pytest.raises(BadConfiguration, match="no pattern of arrivals"):
        parse_pattern(text)
