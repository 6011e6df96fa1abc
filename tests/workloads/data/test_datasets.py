"""Datasets by name, path or file: the embedded ones, what is read, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.base import DataMissing
from workloads.data import records
from workloads.data.datasets import find_dataset, load_examples
from workloads.data.embedded import synthetic_examples
from workloads.data.records import BadExample
from workloads.data.shapes import Example, write_json_lines

CONTENT = st.text(min_size=1, max_size=30).filter(lambda text: bool(text.strip()))


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


@settings(max_examples=20)
@given(
    st.lists(
        st.builds(Example, content=CONTENT, summary=st.text(max_size=30), synthetic=st.booleans()),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_written_is_read_back(tmp_path_factory, written: list[Example]) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.json"
    try:
        write_json_lines(path, written)
    except UnicodeEncodeError:  # lone surrogates are no text
        return
    assert load_examples(str(path)) == written
    assert find_dataset(str(path)).synthetic == written[0].synthetic


def test_an_endless_line_is_refused_without_reading_it_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 100)
    path = tmp_path / "x.json"
    path.write_bytes(b"x" * 1000)
    with pytest.raises(BadExample, match=r"x\.json:1: line longer than 100 bytes"):
        load_examples(str(path))


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("\n\n")
    with pytest.raises(DataMissing, match="holds no examples"):
        load_examples(str(tmp_path / "empty.json"))


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    write_json_lines(path, [Example(content="old")])

    def failing() -> object:
        yield Example(content="new")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        write_json_lines(path, failing())  # type: ignore[arg-type]
    assert load_examples(str(path)) == [Example(content="old")]
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.json"]


LINES = b'{"content": "one"}\n{"content": "two"}\n'


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 274\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Login</body></html>", "a web page"),
        (gzip.compress(LINES), "compressed with gzip"),
        (b"PK\x03\x04" + bytes(100), "a ZIP archive"),
        (b"SQLite format 3\0" + bytes(100), "an SQLite database"),
        (LINES.replace(b"\n", b"\r"), "Extra data"),
    ],
    ids=["pointer", "page", "gzip", "zip", "database", "old Mac"],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadExample, match=kind):
        find_dataset(str(path))


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    (tmp_path / "round.jsonl").symlink_to("round.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, reason in (("gone", "a link to nowhere"), ("round", "circle"), ("pipe", "a pipe")):
        with pytest.raises(DataMissing, match=reason):
            find_dataset(str(tmp_path / f"{name}.jsonl"))
