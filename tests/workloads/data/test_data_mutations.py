"""Mutations of a good data file: harmless ones read the same, others are refused or counted."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.base import BadConfiguration, DataMissing
from workloads.data.datasets import load_dataset
from workloads.data.shapes import Example

Records = list[dict[str, Any]]
EXAMPLES = 200 if os.environ.get("NIGHTGRID_REHEARSAL") else 30
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
RECORDS = st.lists(
    st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT}), min_size=4, max_size=8
)


def lines(records: Records) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in records).encode()


HARMLESS: dict[str, tuple[str, Callable[[Records], bytes]]] = {
    "ends of Windows": (".jsonl", lambda r: lines(r).replace(b"\n", b"\r\n")),
    "a mark": (".jsonl", lambda r: b"\xef\xbb\xbf" + lines(r)),
    "UTF-16": (".jsonl", lambda r: lines(r).decode().encode("utf-16")),
    "UTF-16 without a mark": (".jsonl", lambda r: lines(r).decode().encode("utf-16-le")),
    "UTF-16 of the other end": (".jsonl", lambda r: lines(r).decode().encode("utf-16-be")),
    "a list in UTF-16": (".json", lambda r: json.dumps(r).encode("utf-16")),
    "blank lines": (".jsonl", lambda r: b"\n \n" + lines(r).replace(b"\n", b"\n\n")),
    "no escapes": (".json", lambda r: json.dumps(r, ensure_ascii=False).encode()),
    "an indented list": (".json", lambda r: json.dumps(r, indent=2).encode()),
    "around them an object": (".json", lambda r: json.dumps({"data": r}).encode()),
    "around them, indented": (
        ".json",
        lambda r: json.dumps({"n": 1, "data": r}, indent=1).encode(),
    ),
    "upper case": (".JSONL", lines),
    "columns in another order": (".jsonl", lambda r: lines([dict(reversed(o.items())) for o in r])),
    "more columns": (".jsonl", lambda r: lines([{"id": n, **one} for n, one in enumerate(r)])),
    "no last end of line": (".jsonl", lambda r: lines(r)[:-1]),
}
#: Changes of one record's line, and words of the complaint.
HARMFUL: dict[str, tuple[str, Callable[[dict[str, Any]], bytes]]] = {
    "no prompt": ("no text", lambda one: lines([{"completion": one["completion"]}])),
    "an empty prompt": ("no text", lambda one: lines([one | {"prompt": " "}])),
    "null": ("", lambda one: lines([one | {"prompt": None}])),
    "another type": ("", lambda one: lines([one | {"completion": {"text": "x"}}])),
    "half a character": ("half a character", lambda one: lines([one | {"prompt": "\ud83d"}])),
    "a truth value": ("true or false", lambda one: lines([one | {"prompt": True}])),
    "cut off": ("not JSON", lambda one: lines([one])[:-5] + b"\n"),
    "no JSON": ("not JSON", lambda one: b"prompt: x\n"),
    "too deep": ("not JSON", lambda one: b"[" * 100_000 + b"\n"),
    "no UTF-8": ("not UTF-8", lambda one: b'{"prompt": "\xff", "completion": "x"}\n'),
    "a number": ("a number", lambda one: b"7\n"),
    "a list": ("a list", lambda one: b"[1, 2]\n"),
    "a text": ("a text", lambda one: b'"text"\n'),
}


def examples_of(records: Records) -> list[Example]:
    return [Example(content=one["prompt"], summary=one["completion"]) for one in records]


@pytest.mark.parametrize("way", HARMLESS)
@settings(max_examples=max(EXAMPLES // len(HARMLESS), 3), deadline=None)
@given(records=RECORDS)
def test_a_file_that_says_the_same_is_the_same(way: str, records: Records) -> None:
    ending, write = HARMLESS[way]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"d{ending}"
        path.write_bytes(write(records))
        dataset = load_dataset(str(path))
    assert dataset.examples == examples_of(records) and not dataset.notes


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), records=RECORDS, harm=st.sampled_from(sorted(HARMFUL)))
def test_no_record_changes_unseen(data: st.DataObject, records: Records, harm: str) -> None:
    words, write = HARMFUL[harm]
    at = data.draw(st.integers(1, len(records) - 1))  # the first tells the shape
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "d.jsonl"
        after = lines(records[at + 1 :])
        path.write_bytes(lines(records[:at]) + write(records[at]) + after)
        try:
            dataset = load_dataset(str(path))
        except (BadConfiguration, DataMissing) as error:
            assert f"d.jsonl:{at + 1}: " in str(error) and words in str(error)
            return
    assert dataset.examples == examples_of(records[:at] + records[at + 1 :])
    assert f"1 of {len(records)} records" in dataset.notes and f"d.jsonl:{at + 1}" in dataset.notes
    assert words in dataset.notes
