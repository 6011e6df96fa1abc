"""Mutations of a good data file: harmless ones read the same, others are refused or counted."""

from __future__ import annotations

import gzip
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


#: Ways to write the same records: the file's ending, and its bytes.
HARMLESS: dict[str, tuple[str, Callable[[Records], bytes]]] = {
    "ends of Windows": (".jsonl", lambda r: lines(r).replace(b"\n", b"\r\n")),
    "a mark": (".jsonl", lambda r: b"\xef\xbb\xbf" + lines(r)),
    "UTF-16": (".jsonl", lambda r: lines(r).decode().encode("utf-16")),
    "blank lines": (".jsonl", lambda r: b"\n \n" + lines(r).replace(b"\n", b"\n\n")),
    "no escapes": (".json", lambda r: json.dumps(r, ensure_ascii=False).encode()),
    "an indented list": (".json", lambda r: json.dumps(r, indent=2).encode()),
    "around them an object": (".json", lambda r: json.dumps({"data": r}, indent=1).encode()),
    "compressed": (".jsonl.gz", lambda r: gzip.compress(lines(r))),
    "upper case": (".JSONL", lines),
    "columns in another order": (".jsonl", lambda r: lines([dict(reversed(o.items())) for o in r])),
    "more columns": (".jsonl", lambda r: lines([{"id": n, **one} for n, one in enumerate(r)])),
    "no last end of line": (".jsonl", lambda r: lines(r)[:-1]),
}
#: Changes of one record's line.
HARMFUL: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "no prompt": lambda one: lines([{"completion": one["completion"]}]),
    "an empty prompt": lambda one: lines([one | {"prompt": " "}]),
    "null": lambda one: lines([one | {"prompt": None}]),
    "another type": lambda one: lines([one | {"completion": {"text": "x"}}]),
    "half a character": lambda one: lines([one | {"prompt": "\ud83d"}]),
    "a truth value": lambda one: lines([one | {"prompt": True}]),
    "cut off": lambda one: lines([one])[:-5] + b"\n",
    "no JSON": lambda one: b"prompt: x\n",
    "no UTF-8": lambda one: b'{"prompt": "\xff", "completion": "x"}\n',
    "a number": lambda one: b"7\n",
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
    at = data.draw(st.integers(1, len(records) - 1))  # the first tells the shape
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "d.jsonl"
        after = lines(records[at + 1 :])
        path.write_bytes(lines(records[:at]) + HARMFUL[harm](records[at]) + after)
        try:
            dataset = load_dataset(str(path))
        except (BadConfiguration, DataMissing) as error:
            assert f"d.jsonl:{at + 1}" in str(error)
            return
    assert dataset.examples == examples_of(records[:at] + records[at + 1 :])
    assert f"1 of {len(records)} records" in dataset.notes and f"d.jsonl:{at + 1}" in dataset.notes
