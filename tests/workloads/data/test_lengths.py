"""``nightgrid dataset``: lengths of a dataset in tokens, and a sample at equal distance in them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli import models
from workloads.data.datasets import load_examples
from workloads.data.lengths import Lengths, distribution, equal_distance, token_lengths
from workloads.data.shapes import Example, write_json_lines


class Characters:
    """A tokenizer whose tokens are characters; it takes batches, as fast ones do."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, texts: list[str], *, add_special_tokens: bool, **_: Any) -> dict:
        assert not add_special_tokens
        self.batches.append(len(texts))
        return {"input_ids": [list(range(len(text))) for text in texts]}


def test_tokens_are_counted_in_batches_and_in_order() -> None:
    tokenizer = Characters()
    examples = [Example(content="裤" * (i % 7 + 1), summary="x" * (i % 5)) for i in range(5000)]
    lengths = token_lengths(examples, tokenizer)
    assert lengths == [Lengths(input=i % 7 + 1, output=i % 5) for i in range(5000)]
    assert tokenizer.batches == [2000, 2000, 1000] * 2


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_a_histogram_counts_every_length_once(lengths: list[int]) -> None:
    found = distribution(lengths)
    assert sum(b.count for b in found.bins) == len(lengths)
    for b in found.bins:
        assert b.count == sum(b.low <= length < b.high for length in lengths)
    assert all(a.high == b.low for a, b in zip(found.bins, found.bins[1:], strict=False))
    assert len({b.high - b.low for b in found.bins}) == 1
    assert len(found.bins) <= 12
    values = list(found.percentiles.values())
    assert values == sorted(values)


def test_bins_are_no_more_than_wanted_where_the_first_begins_below_the_shortest() -> None:
    """120 lengths from 9 on would need 13 bins of 10, since the first begins at 0."""
    found = distribution(range(9, 129))
    assert [b.low for b in found.bins] == [0, 20, 40, 60, 80, 100, 120]
    assert len(distribution(range(10, 130)).bins) == 12


@given(st.integers(1, 5000), st.integers(1, 300))
def test_positions_are_evenly_spread(size: int, count: int) -> None:
    places = equal_distance(size, count)
    assert len(places) == min(size, count) == len(set(places))
    assert places == sorted(places) and places[0] >= 0 and places[-1] < size
    if count >= 2 and size >= 2:
        assert (places[0], places[-1]) == (0, size - 1)
        steps = [b - a for a, b in itertools.pairwise(places)]
        assert max(steps) - min(steps) <= 1


@pytest.fixture
def by_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count characters, so that lengths can be checked by hand and no model is needed."""
    embedded = SimpleNamespace(entry=SimpleNamespace(kind="embedded"))
    monkeypatch.setattr(models, "open_model", lambda name: embedded)
    monkeypatch.setattr(models, "load_tokenizer", lambda source: Characters())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An AdvertiseGen directory of 300 + 1 examples with totals 3, 4, … 303."""
    directory = tmp_path / "AdvertiseGen"
    train = [Example(content="类型", summary="x" * (n + 1)) for n in range(300, 0, -1)]
    write_json_lines(directory / "train.json", train)
    write_json_lines(directory / "dev.json", [Example(content="类型", summary="x")])
    return directory


def test_a_split_of_one_file_is_refused_as_by_the_plan(directory, nightgrid) -> None:
    said = nightgrid("dataset", "lengths", directory / "train.json", "--split", "test", code=1).err
    assert "train.json is no dataset of the hub; leave --split out" in said


@pytest.mark.usefixtures("by_character")
def test_files_in_tiny_out(directory, tmp_path, nightgrid) -> None:
    command = ("dataset", "advertisegen", directory, "--tiny", tmp_path)
    printed = nightgrid(*command).out
    assert "301 examples (train.json 300, dev.json 1)" in printed
    assert "SYNTHETIC" not in printed
    line = next(words for words in map(str.split, printed.splitlines()) if words[:1] == ["total"])
    assert line[1:] == ["3.0", "18.0", "78.0", "153.0", "228.0", "288.0", "303.0", "153.0"]
    sample = load_examples(str(tmp_path / "tiny.json"))
    totals = [len(e.content) + len(e.summary) for e in sample]
    assert len(totals) == 100 and (totals[0], totals[-1]) == (3, 303)
    assert {b - a for a, b in itertools.pairwise(totals)} <= {3, 4}
    first = (tmp_path / "tiny.json").read_text(encoding="utf-8").splitlines()[0]
    assert first == '{"content": "类型", "summary": "x"}'
    report = nightgrid(*command, "--count", 7, "--json", "--force").json
    assert report["counts"] == {"train.json": 300, "dev.json": 1}
    assert report["total"]["percentiles"]["median"] == 153
    assert sum(b["count"] for b in report["output"]["bins"]) == 301
    assert (report["tiny_count"], report["synthetic"]) == (7, False)
    assert len(load_examples(str(tmp_path / "tiny.json"))) == 7


@pytest.mark.usefixtures("by_character")
def test_nothing_is_overwritten_unasked(directory, tmp_path, nightgrid) -> None:
    tiny = tmp_path / "tiny.json"
    tiny.write_text("precious")
    command = ("dataset", "advertisegen", directory, "--tiny", tiny)
    assert "exists already; --force" in nightgrid(*command, code=1).err
    assert tiny.read_text() == "precious"
    nightgrid(*command, "--force")
    assert len(load_examples(str(tiny))) == 100


@pytest.mark.usefixtures("by_character")
def test_a_synthetic_set_can_be_tried_and_says_so(tmp_path, nightgrid) -> None:
    made, tiny = tmp_path / "made", tmp_path / "tiny.json"
    nightgrid("dataset", "synthetic", made, "--count", 500)
    assert "--force" in nightgrid("dataset", "synthetic", made, "--count", 500, code=1).err
    assert "SYNTHETIC" in nightgrid("dataset", "advertisegen", made, "--tiny", tiny).out
    sample = load_examples(str(tiny))
    assert len(sample) == 100 and all(example.synthetic for example in sample)


def test_bad_input_is_an_error_with_its_place(directory, tmp_path, nightgrid) -> None:
    with (directory / "train.json").open("a") as file:
        file.write("{oops\n")
    (tmp_path / "empty").mkdir()
    for place, words in (
        (directory, "train.json:301: not JSON"),
        (tmp_path / "empty", "no train.json and no dev.json"),
    ):
        assert words in nightgrid("dataset", "advertisegen", place, code=1).err
    nightgrid("dataset", "synthetic", tmp_path / "one", "--count", 1, code=1)
    nightgrid("dataset", "synthetic", tmp_path / "none", "--count", 0, code=2)


@pytest.mark.usefixtures("by_character")
def test_any_dataset_has_lengths(tmp_path, nightgrid) -> None:
    turns = [{"role": r, "content": r} for r in ("user", "assistant", "user", "assistant")]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"turns": turns}) + "\n")
    error = nightgrid("dataset", "lengths", path, code=1).err
    assert "has turns; expected the columns of one of these" in error
    columns = ("--columns", "messages=turns")
    report = nightgrid("dataset", "lengths", path, *columns, "--json").json
    assert report["input"]["percentiles"]["max"] == len("user" + "assistant" + "user")
    assert report["output"]["percentiles"]["max"] == len("assistant")
