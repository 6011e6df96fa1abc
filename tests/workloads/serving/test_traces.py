"""Recorded loads: Mooncake-like traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workloads.base import DataMissing
from workloads.data.records import BadExample
from workloads.serving.traces import read_trace

LINE = {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}


def written(directory: Path, *lines: Any) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def test_equal_blocks_have_equal_tokens_and_times_begin_at_zero(tmp_path: Path) -> None:
    other = {"timestamp": 3500.0, "input_length": 1024, "output_length": 0, "hash_ids": [0, 2]}
    first, second = read_trace(written(tmp_path, LINE, "", other), 100)
    assert (first.at_s, second.at_s) == (0.0, 2.5)
    assert (first.input_tokens, len(first.prompt), len(second.prompt)) == (700, 700, 1024)
    assert (
        first.prompt[:512] == second.prompt[:512] and first.prompt[512:] != second.prompt[512:700]
    )
    assert (first.output_tokens, second.output_tokens) == (5, 1)
    assert read_trace(tmp_path / "trace.jsonl", 100, count=1) == [first]


def test_other_writers_names_are_read_and_blocks_are_not_needed(tmp_path: Path) -> None:
    line = {"created_time": 5, "input_tokens": 9, "output_tokens": 2}
    one, two = read_trace(written(tmp_path, line, line), 50)
    assert len(one.prompt) == 9 and max(one.prompt) < 50 and one.prompt != two.prompt


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: timestamp is null"),
        (LINE | {"input_length": 0}, "input_length is 0"),
        (LINE | {"input_length": "7"}, 'input_length is "7"'),
        (LINE | {"output_length": True}, "output_length is true"),
        (LINE | {"timestamp": 999}, "before that of the line above"),
        (LINE | {"hash_ids": [1]}, "1 hash_ids for 700 tokens, in blocks of 512"),
        (LINE | {"hash_ids": 4}, "no list of hash_ids"),
    ],
)
def test_a_bad_line_is_named(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadExample, match=r"trace\.jsonl") as raised:
        read_trace(written(tmp_path, LINE, line), 100)
    assert message in str(raised.value)


def test_a_trace_that_is_not_there_or_empty_is_missing(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", written(tmp_path, "")):
        with pytest.raises(DataMissing):
            read_trace(path, 100)
