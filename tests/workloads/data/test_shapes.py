"""The shapes in which people have their data: what each means, and what is refused where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from workloads.base import BadConfiguration, DataMissing
from workloads.data.datasets import Reading, find_dataset, load_dataset, load_examples
from workloads.data.records import hub_records
from workloads.data.shapes import Example, Turn
from workloads.util import files

ALPACA = {"instruction": "Translate.", "input": "chat", "output": "cat"}
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Thanks."},
]
CHAT = Example(
    content="Two?",
    summary="2",
    earlier=(
        Turn(role="system", text="Be short."),
        Turn(role="user", text="One?"),
        Turn(role="assistant", text="1"),
    ),
)
SHAREGPT = [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"}]


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    ("record", "example", "learned"),
    [
        (ALPACA, Example(content="Translate.\n\nchat", summary="cat"), "the answer"),
        (ALPACA | {"input": ""}, Example(content="Translate.", summary="cat"), "the answer"),
        ({"messages": TURNS}, CHAT, "the last answer of each conversation"),
        (
            {"conversations": SHAREGPT},
            Example(content="Two?", summary="2"),
            "the last answer of each conversation",
        ),
        (
            {"prompt": "Two?", "completion": "2"},
            Example(content="Two?", summary="2"),
            "the answer",
        ),
        ({"prompt": TURNS[:4], "completion": TURNS[4:5]}, CHAT, "the answer"),
        ({"prompt": "Two?"}, Example(content="Two?"), "every token of the text"),
        ({"text": "Once."}, Example(content="Once."), "every token of the text"),
    ],
)
def test_a_shape_is_told_by_its_columns(
    tmp_path: Path, record: dict[str, Any], example: Example, learned: str
) -> None:
    """Prompt and answer are found in each, and what is learned of it is said."""
    dataset = load_dataset(lines(tmp_path / "d.jsonl", record, record))
    assert dataset.examples == [example] * 2
    assert dataset.learned == learned


@pytest.mark.parametrize("ending", ["json", "csv", "tsv", "parquet"])
def test_files_of_each_kind_hold_the_same(tmp_path: Path, ending: str) -> None:
    """A JSON list, tables with quoted line breaks, and Parquet."""
    records = [{"prompt": 'a, "b"\nc\t', "completion": "1"}, {"prompt": "二", "completion": "2"}]
    path = tmp_path / f"d.{ending}"
    if ending == "json":
        path.write_text(json.dumps(records, indent=1))
    elif ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        comma = {"csv": ",", "tsv": "\t"}[ending]
        rows = [("prompt", "completion"), ('"a, ""b""\nc\t"', "1"), ("二", "2")]
        path.write_text("".join(comma.join(row) + "\r\n" for row in rows), newline="")
    assert [(e.content, e.summary) for e in load_examples(str(path))] == [
        ('a, "b"\nc\t', "1"),
        ("二", "2"),
    ]


def test_columns_have_other_names(tmp_path: Path) -> None:
    """`columns:` says which is which."""
    path = lines(tmp_path / "d.jsonl", {"question": "Two?", "reply": "2", "id": 3})
    with pytest.raises(BadConfiguration, match=r"has question, reply, id; .* or name them"):
        load_examples(path)
    reading = Reading(columns="prompt=question, completion = reply")
    assert load_examples(path, reading) == [Example(content="Two?", summary="2")]


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ("question", "is no pair"),
        ("promt=question", "did you mean prompt"),
        ("text=a, completion=b", "belong to no one shape"),
        ("completion=reply", "belong to no one shape"),
        ("prompt=nothing", r'd\.jsonl:1: no text under "nothing"'),
    ],
)
def test_columns_that_fit_nothing_are_refused(tmp_path: Path, columns: str, complaint: str) -> None:
    """With what would be right."""
    path = lines(tmp_path / "d.jsonl", {"question": "Two?", "reply": "2"})
    with pytest.raises(BadConfiguration, match=complaint):
        find_dataset(path, Reading(columns=columns))


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"instruction": "x", "output": 3}, r'd\.jsonl:2: "output" is a number'),
        ({"messages": []}, r'd\.jsonl:2: "messages" is no list of turns'),
        ({"messages": "hello"}, "no list of turns"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "none of the roles system, user"),
        ({"messages": [{"role": "user"}]}, 'turn 1 of "messages" has no text'),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no turn of the user"),
        ({"messages": [3]}, 'turn 1 of "messages" is a number'),
    ],
)
def test_an_example_of_another_shape_is_refused_in_the_plan(
    tmp_path: Path, record: dict[str, Any], complaint: str
) -> None:
    """File and line are named, and the failure is one that is not retried."""
    good = {"messages": TURNS} if "messages" in record else ALPACA
    path = lines(tmp_path / "d.jsonl", good, record)
    with pytest.raises(BadConfiguration, match=complaint):
        find_dataset(path, Reading())


def test_a_table_with_a_short_line_is_refused(tmp_path: Path) -> None:
    """Its line is named."""
    path = tmp_path / "d.csv"
    path.write_text("prompt,completion\na,b\nc\n")
    with pytest.raises(BadConfiguration, match=r"d\.csv:3: not one value for each of the columns"):
        find_dataset(str(path), Reading())
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadConfiguration, match="no Parquet file"):
        find_dataset(str(tmp_path / "d.parquet"), Reading())


def test_a_directory_of_files_of_one_kind_is_a_dataset(tmp_path: Path) -> None:
    """Its files one after the other, by name; several kinds are a question."""
    lines(tmp_path / "b.jsonl", {"text": "2"})
    lines(tmp_path / "a.jsonl", {"text": "1"})
    assert [e.content for e in load_examples(str(tmp_path))] == ["1", "2"]
    (tmp_path / "c.csv").write_text("text\n3\n")
    with pytest.raises(BadConfiguration, match="files of several kinds"):
        find_dataset(str(tmp_path))


def test_a_plan_reads_the_first_examples_alone_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long file costs a plan no more than a short one: for its name and for its shape it is read
    once, and again when it has changed."""
    opened: list[Path] = []
    read = files.opened

    def count(path: Path) -> Any:
        opened.append(path)
        return read(path)

    monkeypatch.setattr(files, "opened", count)
    path = lines(tmp_path / "d.jsonl", ALPACA)
    for _ in range(2):
        find_dataset(path)
        find_dataset(path, Reading())
        find_dataset(path, Reading(columns="prompt=instruction"))
    assert len(opened) == 2  # the kind of file is told by its first bytes
    lines(tmp_path / "d.jsonl", {"nothing": 1})
    with pytest.raises(BadConfiguration, match=r"d\.jsonl:1"):
        find_dataset(path, Reading())


def test_what_is_learned_follows_the_examples(tmp_path: Path) -> None:
    """Of an example without an answer the whole text is, whatever its shape."""
    asked = [{"content": "a", "summary": "b"}, {"content": "c", "summary": ""}, {"content": "d"}]
    found = [
        load_dataset(lines(tmp_path / f"{n}.jsonl", *part)).learned
        for n, part in enumerate((asked[:1], asked, asked[1:]))
    ]
    assert found == [
        "the answer",
        "the answer; every token of the text of 2 of 3 examples, which have no answer",
        "every token of the text",
    ]
    assert load_dataset("english-prompts").learned == "every token of the text"
    assert load_dataset("advertisegen-synthetic").learned == "the answer"


def test_a_plan_reads_no_further_than_it_looks(tmp_path: Path) -> None:
    """A fault beyond the first examples is the job's to find."""
    path = lines(tmp_path / "d.jsonl", *[ALPACA] * 30, {"nothing": 1})
    find_dataset(path, Reading())
    with pytest.raises(BadConfiguration, match=r"d\.jsonl:31"):
        load_examples(path)


def test_a_name_with_a_slash_is_a_hub_id_unless_it_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is missing from a directory that is there is no dataset of the hub."""
    monkeypatch.chdir(tmp_path)
    assert find_dataset("tatsu-lab/alpaca").kind == "hub"
    (tmp_path / "data").mkdir()
    for name in ("data/alpaca", "tatsu-lab/alpaca.json"):
        with pytest.raises(DataMissing, match="no dataset"):
            find_dataset(name)


def test_datasets_of_the_hub_come_through_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split and a part of it; what cannot be had is said with the name and the split."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "mine").mkdir()
    lines(tmp_path / "mine" / "train.jsonl", ALPACA, ALPACA | {"output": "Katze"})
    found = list(hub_records(str(tmp_path / "mine"), "train[1:]"))
    assert [(where.split(": ")[1], record["output"]) for where, record in found] == [
        ("example 1", "Katze")
    ]
    with pytest.raises(DataMissing, match="split nothing"):
        list(hub_records(str(tmp_path / "mine"), "nothing"))
