"""The shapes in which people have their data: what each means, and what is refused where."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from workloads.base import BadConfiguration, DataMissing
from workloads.data import datasets, records
from workloads.data.datasets import Reading, find_dataset, load_dataset, load_examples
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
CALLS = [{"function": {"name": "f", "arguments": "{}"}}]
CALLING = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]
CALLED = Example(
    content="",
    summary="It rains.",
    earlier=(
        Turn(role="user", text="Weather?"),
        Turn(role="assistant", text="", tool_calls=tuple(CALLS)),
        Turn(role="tool", text="rain"),
    ),
)


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


CONVERSATION = "the last answer of each conversation"
QUESTION = Example(content="Two?", summary="2")


@pytest.mark.parametrize(
    ("record", "example", "learned"),
    [
        (ALPACA, Example(content="Translate.\n\nchat", summary="cat"), "the answer"),
        (ALPACA | {"input": ""}, Example(content="Translate.", summary="cat"), "the answer"),
        (ALPACA | {"input": math.nan}, Example(content="Translate.", summary="cat"), "the answer"),
        ({"messages": TURNS}, CHAT, CONVERSATION),
        ({"messages": CALLING}, CALLED, CONVERSATION),
        ({"conversations": SHAREGPT}, QUESTION, CONVERSATION),
        ({"prompt": "Two?", "completion": "2"}, QUESTION, "the answer"),
        ({"prompt": TURNS[:4], "completion": TURNS[4:5]}, CHAT, "the answer"),
        ({"prompt": "Two?"}, Example(content="Two?"), "every token of the text"),
        ({"text": "Once."}, Example(content="Once."), "every token of the text"),
        # GSM8K, and a number; Dolly; XSum; SQuAD
        ({"question": "Two?", "answer": 2}, QUESTION, "the answer"),
        (
            {"instruction": "a", "context": "b", "response": "c"},
            Example(content="a\n\nb", summary="c"),
            "the answer",
        ),
        *(  # either's second text beside the other's answer, and both
            ({**record, "instruction": "a"}, Example(content=text, summary="c"), "the answer")
            for record, text in (
                ({"input": "b", "response": "c"}, "a\n\nb"),
                ({"context": "b", "output": "c"}, "a\n\nb"),
                ({"context": "b", "input": "d", "output": "c"}, "a\n\nd\n\nb"),
            )
        ),
        (
            {"document": "long", "summary": "short", "id": "1"},
            Example(content="long", summary="short"),
            "the summary",
        ),
        (
            {"question": "q", "context": "c", "answers": {"text": ["a", "b"]}},
            Example(content="c\n\nq", summary="a"),
            "the first answer",
        ),
    ],
)
def test_a_shape_is_told_by_its_columns(tmp_path, record, example, learned) -> None:
    dataset = load_dataset(lines(tmp_path / "d.jsonl", record, record))
    assert dataset.examples == [example] * 2
    assert dataset.learned == learned


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "utf16.csv"])
def test_files_of_each_kind_hold_the_same(tmp_path: Path, ending: str) -> None:
    records = [{"prompt": 'a, "b"\nc\t', "completion": "1"}, {"prompt": "二", "completion": "2"}]
    path = tmp_path / f"d.{ending}"
    if ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        comma = "\t" if ending == "tsv" else ","
        rows = [("prompt", " completion"), ('"a, ""b""\nc\t"', "1"), ("二", "2")]
        text = "".join(comma.join(row) + "\r\n" for row in rows)
        path.write_text(text, newline="", encoding="utf-16" if "utf16" in ending else "utf-8")
    assert [(e.content, e.summary) for e in load_examples(str(path))] == [
        ('a, "b"\nc\t', "1"),
        ("二", "2"),
    ]


def test_columns_have_other_names(tmp_path: Path) -> None:
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
        ("prompt=nothing", r"d\.jsonl:1: columns: names 'nothing'.* has question, reply"),
        ("prompt=question, completion=answer", "names 'answer', which no record has"),
    ],
)
def test_columns_that_fit_nothing_are_refused(tmp_path: Path, columns: str, complaint: str) -> None:
    path = lines(tmp_path / "d.jsonl", {"question": "Two?", "reply": "2"})
    with pytest.raises(BadConfiguration, match=complaint):
        find_dataset(path, Reading(columns=columns))


def test_a_named_column_may_be_left_out_where_it_is_empty(tmp_path: Path, monkeypatch) -> None:
    path = lines(tmp_path / "d.jsonl", *[{"q": "Two?"}] * 300, {"q": "Two?", "a": "2"})
    reading = Reading(columns="prompt=q, completion=a")
    dataset = load_dataset(path, reading)
    assert [example.summary for example in dataset.examples] == [*[""] * 300, "2"]
    monkeypatch.setattr(datasets, "LOOK_S", 0.0)  # the plan does not see the last
    assert find_dataset(path, reading).kind == "file"


@pytest.mark.parametrize(("about", "answer"), [("context", "response"), ("input", "output")])
def test_named_columns_are_of_the_shape_whose_own_they_are(tmp_path, about, answer) -> None:
    path = lines(tmp_path / "d.jsonl", {"question": "a", "passage": "b", answer: "c"})
    dataset = load_dataset(path, Reading(columns=f"instruction=question, {about}=passage"))
    assert dataset.examples == [Example(content="a\n\nb", summary="c")]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"instruction": "x", "output": True}, '"output" is true or false'),
        ({"instruction": " ", "output": "y"}, 'no text under "instruction"'),
        ({"instruction": "a\ud83d", "output": "y"}, "half a character"),
        ({"other": "x"}, 'no text under "instruction"'),
        ({"messages": []}, '"messages" is no list of turns'),
        ({"messages": "hello"}, "no list of turns"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "none of the roles system, user"),
        ({"messages": [{"role": "user"}]}, 'turn 1 of "messages" has no text'),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no turn of the user"),
        ({"messages": [3]}, 'turn 1 of "messages" is a number'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ],
)
def test_an_unusable_record_is_left_out_and_counted(tmp_path, record, complaint) -> None:
    good = {"messages": TURNS} if "messages" in record else ALPACA
    path = lines(tmp_path / "d.jsonl", *[good] * 30, record)
    for read in (find_dataset(path, Reading()), load_dataset(path)):
        assert "1 of 31 records are left out (1: " in read.notes
        assert "d.jsonl:31: " in read.notes and complaint in read.notes
    assert len(load_examples(path)) == 30
    if record != {"other": "x"}:
        path = lines(tmp_path / "most.jsonl", good, record, record)
        with pytest.raises(BadConfiguration, match=r"most\.jsonl:2: .*so are 1 more of 3 records"):
            find_dataset(path, Reading())


@pytest.mark.parametrize(
    ("turns", "earlier", "content"),
    [
        ([("prompter", "hi"), ("chatgpt", "yo")], [], "hi"),
        ([("User", "hi"), ("user", "again"), ("model", "yo")], [], "hi\n\nagain"),
        ([("user", [{"type": "text", "text": "hi"}, "you"]), ("ai", "yo")], [], "hi\nyou"),
        ([("user", "hi"), ("tool", "1"), ("gpt", "yo")], [("user", "hi"), ("tool", "1")], ""),
    ],
)
def test_speakers_have_many_names(tmp_path, turns, earlier, content) -> None:
    record = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    (example,) = load_examples(lines(tmp_path / "d.jsonl", record))
    assert example.content == content and example.summary == "yo"
    assert [(turn.role, turn.text) for turn in example.earlier] == earlier


def test_a_question_with_more_to_read_is_not_guessed(tmp_path: Path) -> None:
    record = {"question": "q", "choices": ["a", "b"], "answer": "b"}
    with pytest.raises(BadConfiguration, match="columns: prompt=question, completion=answer"):
        find_dataset(lines(tmp_path / "d.jsonl", record), Reading())


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"prompt": "q", "response": "a"}, "prompt=prompt, completion=response"),
        ({"prompt": "q", "rejected": "b", "chosen": "a"}, "prompt=prompt, completion=chosen"),
        ({"text": "q", "target": "a"}, "prompt=text, completion=target"),
        ({"prompt": "q", "id": "7"}, ""),
        ({"prompt": "q", "completion": "a", "output": "b"}, ""),
        ({"messages": TURNS, "output": "b"}, ""),
    ],
)
def test_an_answer_that_is_likely_is_not_learned_as_a_prompt(tmp_path, record, columns) -> None:
    path = lines(tmp_path / "d.jsonl", record)
    assert find_dataset(path, Reading()).unnamed == columns
    assert load_dataset(path).unnamed == columns
    if columns:
        named = load_dataset(path, Reading(columns=columns))
        assert not named.unnamed and named.learned == "the answer"


@pytest.mark.parametrize("column", ["role", "parent_id", "speaker"])
def test_a_message_a_record_is_no_example(tmp_path: Path, column: str) -> None:
    """As OpenAssistant's trees are: answers would be prompts."""
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"text": "hi", column: "assistant"}))
    with pytest.raises(BadConfiguration, match=rf"one message of a conversation \({column}\)"):
        find_dataset(str(path), Reading())
    assert load_examples(str(path), Reading(columns="text=text"))[0].content == "hi"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("d.csv", b"content,content\na,b\n", "two columns are named 'content'"),
        ("d.csv", b"prompt,completion\na,b\nc\n", r"d\.csv:3: not one value for each of the"),
        ("d.parquet", b"PAR1", "no Parquet file"),
    ],
)
def test_a_table_that_is_none_is_refused(name, content, complaint, tmp_path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadConfiguration, match=complaint):
        find_dataset(str(tmp_path / name), Reading())


def test_a_directory_of_files_of_one_kind_is_a_dataset(tmp_path: Path) -> None:
    lines(tmp_path / "b.JSONL", {"text": "2"})
    lines(tmp_path / "a.jsonl", {"text": "1"})
    for beside in (".hidden.csv", "_SUCCESS.csv", "dataset_info.json"):
        (tmp_path / beside).write_text("text\nno\n")
    assert [e.content for e in load_examples(str(tmp_path))] == ["1", "2"]
    (tmp_path / "c.csv").write_text("text\n3\n")
    with pytest.raises(BadConfiguration, match="files of several kinds"):
        find_dataset(str(tmp_path), Reading())


@pytest.mark.parametrize("nested", [False, True])
def test_a_split_of_a_directory_is_chosen(tmp_path: Path, nested: bool) -> None:
    for name in ("train-00000-of-00001", "my_test", "validation"):
        path = tmp_path / "data" / name / "0.jsonl" if nested else tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines(path, {"text": name})
    for split, content in (("train", "train"), ("test", "test"), ("dev", "validation")):
        (example,) = load_examples(str(tmp_path), Reading(split=split))
        assert content in example.content
    with pytest.raises(BadConfiguration, match=r"no split 'x'; write split: test or train or val"):
        find_dataset(str(tmp_path), Reading(split="x"))


def test_a_directory_may_lack_the_usual_split(tmp_path: Path) -> None:
    """A grid is looked through before it says which split its jobs read."""
    for name in ("test", "validation"):
        lines(tmp_path / f"{name}.jsonl", {"text": name})
    assert find_dataset(str(tmp_path)).kind == "directory"
    (example,) = load_examples(str(tmp_path), Reading(split="test"))
    assert example.content == "test"
    with pytest.raises(BadConfiguration, match="no split 'train'; write split: test or val"):
        find_dataset(str(tmp_path), Reading())


def test_train_is_not_read_from_test_files_beside_others(tmp_path: Path) -> None:
    for name in ("alpaca", "alpaca_test"):
        lines(tmp_path / f"{name}.jsonl", {"text": name})
    with pytest.raises(BadConfiguration, match=r"with and without a split in .*; name one of them"):
        find_dataset(str(tmp_path), Reading())
    (example,) = load_examples(str(tmp_path), Reading(split="test"))
    assert example.content == "alpaca_test"


@pytest.mark.parametrize(
    ("record", "read"), [({"text": "x"}, 1), ({"content": "x", "summary": "y"}, 2)]
)
def test_train_is_merged_with_dev_in_advertisegen_only(tmp_path, record, read) -> None:
    for name in ("train", "dev", "test"):
        lines(tmp_path / f"{name}.json", record)
    assert len(load_examples(str(tmp_path))) == read


def test_what_save_to_disk_leaves_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict, load_from_disk

    made = {name: Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    DatasetDict(made).save_to_disk(tmp_path / "both")
    made["test"].save_to_disk(tmp_path / "one")
    assert load_examples(str(tmp_path / "both"))[0].content == "train"
    assert load_examples(str(tmp_path / "one"))[0].content == "test"
    mapped = load_from_disk(str(tmp_path / "one")).map(lambda record: {"more": record["text"]})
    assert mapped.cache_files and list((tmp_path / "one").glob("cache-*.arrow"))
    assert len(load_examples(str(tmp_path / "one"))) == 1


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
def test_compressed_files_are_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"d.jsonl.{ending}"
    text = json.dumps(ALPACA).encode()
    packed = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
    }[ending](text)
    path.write_bytes(packed)
    assert load_examples(str(path))[0].summary == "cat"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(BadConfiguration, match=r"damaged|not JSON|cut off"):
        load_examples(str(path))


def test_another_encoding_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_bytes('[{"text": "宽松"}]'.encode("gbk"))
    with pytest.raises(BadConfiguration, match=r"not UTF-8 \(byte 12\); save it as UTF-8"):
        load_examples(str(path))
    path = tmp_path / "d.csv.zst"  # in which nothing can be read again
    table = b"prompt,completion\n" + b"one,two\n" * 40 + "café,three\n".encode("cp1252")
    path.write_bytes(pyarrow.compress(table, "zstd", asbytes=True))
    with pytest.raises(BadConfiguration, match=r"zst:42: not UTF-8 \(byte 4\);.*-f CP1252"):
        load_examples(str(path))


def test_a_date_beyond_pythons_is_named(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"prompt": ["a"], "at": pyarrow.array([2**28], pyarrow.int32()).cast(pyarrow.date32())}
    )
    parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(BadConfiguration, match=r"d\.parquet: .*a date after the year 9999"):
        load_examples(str(tmp_path / "d.parquet"))


def test_an_object_without_one_list_of_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"a": 1, "b": 2}, indent=1))
    with pytest.raises(BadConfiguration, match="one JSON object with a, b"):
        load_examples(str(path))


@given(
    values=st.lists(
        st.recursive(
            st.none() | st.text() | st.floats(allow_nan=False) | st.integers(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        )
    ),
    indent=st.sampled_from([None, 0, 2]),
    piece=st.integers(1, 40),
)
def test_a_list_in_pieces_is_the_list(values: list[Any], indent: int | None, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(records, "CHUNK_BYTES", piece)
        path = Path(directory) / "d.json"
        path.write_text(json.dumps(values, indent=indent))
        assert [record for _, record in records.records(path)] == values


@pytest.mark.parametrize(
    "text", ["[1 2]", "[1,]", "[1", '[{"a":1},{"b":]', "[] x", "[,1]", "[1,,2]"]
)
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(BadConfiguration, match=r"d\.json:1: "):
        list(records.records(tmp_path / "d.json"))


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    read = files.opened
    monkeypatch.setattr(files, "opened", lambda path: opened.append(path) or read(path))
    path = lines(tmp_path / "d.jsonl", ALPACA)
    for _ in range(2):
        find_dataset(path, Reading())
        load_dataset(path)
    assert len(opened) == 2
    lines(tmp_path / "d.jsonl", {"nothing": 1})
    with pytest.raises(BadConfiguration, match=r"d\.jsonl:1"):
        find_dataset(path, Reading())


def test_what_is_learned_follows_the_examples(tmp_path: Path) -> None:
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


def test_a_plan_stops_looking_when_its_time_is_over(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets, "LOOK_S", 0.0)
    path = lines(tmp_path / "d.jsonl", *[ALPACA] * 600, 7)
    assert "the first 256 records were looked at" in find_dataset(path, Reading()).notes
    with pytest.raises(BadConfiguration, match=r"d\.jsonl:601: a number"):
        load_examples(path)


def test_a_name_with_a_slash_is_a_hub_id_unless_it_is_a_path(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_dataset("tatsu-lab/alpaca").kind == "hub"
    (tmp_path / "data").mkdir()
    for name in ("data/alpaca", "tatsu-lab/alpaca.json"):
        with pytest.raises(DataMissing, match="no dataset"):
            find_dataset(name)


# Mutations of a good file: harmless ones read the same, others are refused or counted.

Records = list[dict[str, Any]]
COUNT = 200 if os.environ.get("NIGHTGRID_REHEARSAL") else 30
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
RECORDS = st.lists(
    st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT}), min_size=4, max_size=8
)


def dumps(records: Records) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in records).encode()


HARMLESS: dict[str, tuple[str, Callable[[Records], bytes]]] = {
    "ends of Windows": (".jsonl", lambda r: dumps(r).replace(b"\n", b"\r\n")),
    "a mark": (".jsonl", lambda r: b"\xef\xbb\xbf" + dumps(r)),
    "UTF-16": (".jsonl", lambda r: dumps(r).decode().encode("utf-16")),
    "UTF-16 without a mark": (".jsonl", lambda r: dumps(r).decode().encode("utf-16-le")),
    "UTF-16 of the other end": (".jsonl", lambda r: dumps(r).decode().encode("utf-16-be")),
    "a list in UTF-16": (".json", lambda r: json.dumps(r).encode("utf-16")),
    "blank lines": (".jsonl", lambda r: b"\n \n" + dumps(r).replace(b"\n", b"\n\n")),
    "no escapes": (".json", lambda r: json.dumps(r, ensure_ascii=False).encode()),
    "an indented list": (".json", lambda r: json.dumps(r, indent=2).encode()),
    "around them an object": (".json", lambda r: json.dumps({"data": r}).encode()),
    "around them, indented": (
        ".json",
        lambda r: json.dumps({"n": 1, "data": r}, indent=1).encode(),
    ),
    "upper case": (".JSONL", dumps),
    "columns in another order": (
        ".jsonl",
        lambda r: dumps([dict(reversed(o.items())) for o in r]),
    ),
    "more columns": (".jsonl", lambda r: dumps([{"id": n, **one} for n, one in enumerate(r)])),
    "no last end of line": (".jsonl", lambda r: dumps(r)[:-1]),
}
#: Changes of one record's line, and words of the complaint.
HARMFUL: dict[str, tuple[str, Callable[[dict[str, Any]], bytes]]] = {
    "no prompt": ("no text", lambda one: dumps([{"completion": one["completion"]}])),
    "an empty prompt": ("no text", lambda one: dumps([one | {"prompt": " "}])),
    "null": ("", lambda one: dumps([one | {"prompt": None}])),
    "another type": ("", lambda one: dumps([one | {"completion": {"text": "x"}}])),
    "half a character": ("half a character", lambda one: dumps([one | {"prompt": "\ud83d"}])),
    "a truth value": ("true or false", lambda one: dumps([one | {"prompt": True}])),
    "cut off": ("not JSON", lambda one: dumps([one])[:-5] + b"\n"),
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
@settings(max_examples=max(COUNT // len(HARMLESS), 3), deadline=None)
@given(records=RECORDS)
def test_a_file_that_says_the_same_is_the_same(way: str, records: Records) -> None:
    ending, write = HARMLESS[way]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"d{ending}"
        path.write_bytes(write(records))
        dataset = load_dataset(str(path))
    assert dataset.examples == examples_of(records) and not dataset.notes


@settings(max_examples=COUNT, deadline=None)
@given(data=st.data(), records=RECORDS, harm=st.sampled_from(sorted(HARMFUL)))
def test_no_record_changes_unseen(data: st.DataObject, records: Records, harm: str) -> None:
    words, write = HARMFUL[harm]
    at = data.draw(st.integers(1, len(records) - 1))  # the first tells the shape
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "d.jsonl"
        after = dumps(records[at + 1 :])
        path.write_bytes(dumps(records[:at]) + write(records[at]) + after)
        try:
            dataset = load_dataset(str(path))
        except (BadConfiguration, DataMissing) as error:
            assert f"d.jsonl:{at + 1}: " in str(error) and words in str(error)
            return
    assert dataset.examples == examples_of(records[:at] + records[at + 1 :])
    assert f"1 of {len(records)} records" in dataset.notes and f"d.jsonl:{at + 1}" in dataset.notes
    assert words in dataset.notes
