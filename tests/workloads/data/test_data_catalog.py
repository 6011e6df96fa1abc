"""Datasets by name or path, and the embedded ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from workloads.base import DataMissing
from workloads.data.datasets import find_dataset, load_examples
from workloads.data.embedded import synthetic_examples
from workloads.data.shapes import Example, write_json_lines


def quantile(lengths: list[int], share: float) -> int:
    return sorted(lengths)[int(share * (len(lengths) - 1))]


def test_the_synthetic_twin_has_the_lengths_and_the_shape_of_the_real_set() -> None:
    """Nine in ten inputs have 20-130 characters, outputs 50-250, skewed right. Attributes are
    ``key#value`` joined by ``*``, first the kind of garment; all differ."""
    examples = load_examples("advertisegen-synthetic")
    assert len(set(examples)) == len(examples) == 1000
    for lengths, least, most in (
        ([len(example.content) for example in examples], 20, 130),
        ([len(example.summary) for example in examples], 50, 250),
    ):
        assert quantile(lengths, 0.05) >= least and quantile(lengths, 0.95) <= most
        assert sum(lengths) / len(lengths) > quantile(lengths, 0.5)
        assert len(set(lengths)) > 60
    for example in examples:
        pairs = [attribute.split("#") for attribute in example.content.split("*")]
        assert all(len(pair) == 2 and all(pair) for pair in pairs)
        assert pairs[0][0] == "类型"
        assert example.summary.endswith("。") and example.synthetic
    # The content is pinned, since rows measured on it are compared across machines.
    text = "\n".join(f"{e.content}\t{e.summary}" for e in synthetic_examples(1000))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "96c7e2bda176f3fd"


def test_a_longer_set_begins_with_the_shorter() -> None:
    assert synthetic_examples(50)[:20] == synthetic_examples(20)
    assert synthetic_examples(20, seed=1) != synthetic_examples(20)


def test_an_advertisegen_directory_is_a_dataset(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "dev.json", [Example(content="d")])
    assert [e.content for e in load_examples(str(tmp_path))] == ["d"]
    write_json_lines(tmp_path / "train.json", [Example(content="t")])
    assert [e.content for e in load_examples(str(tmp_path))] == ["t", "d"]
    found = find_dataset(str(tmp_path))
    assert (found.kind, found.synthetic) == ("directory", False)


def test_an_unknown_dataset_is_refused_with_close_matches(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"'advertisegen'.*Did you mean advertisegen-synthetic"):
        find_dataset("advertisegen")
    with pytest.raises(DataMissing, match="Known: advertisegen-synthetic, english-prompts"):
        find_dataset("qqq")
    with pytest.raises(DataMissing, match=r"neither train\.json nor dev\.json"):
        find_dataset(str(tmp_path))
    for name in ("x" * 5000, "a\0b", str(tmp_path / "none")):
        with pytest.raises(DataMissing, match="no dataset"):
            load_examples(name)
