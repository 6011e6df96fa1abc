"""Files of data that somebody might name in a first grid and that are not what it can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.main import main

GRID = """\
name: g
experiments:
  - name: e
    workload: finetuning
    model: tiny-chatglm3
    accelerator: CPU
    dataset: {name}
    {more}
"""
PAIR = b'{"prompt": "a", "completion": "b"}\n'
CHAT = 'expected {"messages": [{"role": "user", "content": "…"}, {"role": "assistant"'


def turn(role: str, content: str) -> bytes:
    """A chat of one turn; its content is JSON."""
    return f'{{"messages": [{{"role": "{role}", "content": {content}}}]}}'.encode()


#: The file, its content, a further line of the grid, and words of the message.
BAD: list[tuple[str, bytes | None, str, tuple[str, ...]]] = [
    (
        "missing.jsonl",
        None,
        "",
        ("7:14", "no dataset 'missing.jsonl'", ".ndjson, .parquet, .arrow, .csv"),
    ),
    ("empty.jsonl", b"", "", ("7:14", "holds no examples", "a JSON object a line, or a table")),
    ("blank.jsonl", b"\n \n", "", ("holds no examples", "a JSON object a line, or a table")),
    ("empty.json", b"[]", "", ("holds no examples",)),
    ("empty.csv", b"prompt,completion\n", "", ("holds no examples", "a table with a line of")),
    ("a.jsonl", PAIR + b"hello\n", "", ("a.jsonl:2", "not JSON", "column 1", "one JSON object")),
    ("a.jsonl", b'{"text": "a"', "", ("a.jsonl:1: not JSON", 'such as {"content"')),
    ("a.jsonl", "{'text': 'é'}".encode("latin-1"), "", ("a.jsonl:1: not UTF-8 (byte 11)",)),
    ("a.jsonl", b'\xff\xfe{"text"', "", ("a.jsonl:1: not UTF-16",)),
    ("a.json", b"[1, 2]", "", ("a.json:1: example 1: a number", "expected the columns of one")),
    ("a.jsonl", b'{"data": []}', "", ("a.jsonl:1: has data", "expected the columns of one")),
    (
        "a.jsonl",
        b'{"id": 1, "input": "a", "output": "b"}',
        "",
        ("has id, input, output", "instruction, output, input", "prompt=input, completion=output"),
    ),
    ("a.jsonl", b'{"prompt": true}', "", ('"prompt" is true or false', 'expected {"prompt": "…"')),
    ("a.jsonl", PAIR + b'{"prompt": ""}\n' * 2, "", ("a.jsonl:2", 'no text under "prompt"')),
    ("a.jsonl", b'{"messages": "hi"}', "", ('"messages" is no list of turns', CHAT)),
    ("a.jsonl", b'{"messages": []}', "", ('"messages" is no list of turns', CHAT)),
    (
        "a.jsonl",
        turn("boss", '"x"'),
        "",
        ("turn 1", "none of the roles system, user, assistant", CHAT),
    ),
    (
        "a.jsonl",
        turn("user", "[{}]"),
        "",
        ('turn 1 of "messages" has a part that is no text', CHAT),
    ),
    ("a.jsonl", turn("assistant", '"x"'), "", ("no turn of the user stands before the", CHAT)),
    ("a.parquet", b"PAR1 nonsense", "", ("a.parquet: no Parquet file",)),
    ("a.csv", b'prompt,completion\n"a,b\n', "", ('a field that begins with " ends with one',)),
    ("a.csv", b"prompt,completion\na\n", "", ("a.csv:2", "each of the columns prompt, completion")),
    ("a.csv", b"prompt;completion\na;b\n", "", ("a.csv:1", "divided by ';'; .csv wants ','")),
    ("a.xlsx", b"PK\x03\x04", "", ("7:14", "it is a ZIP archive (as .xlsx is): unpack it")),
    ("a.jsonl.gz", b"\x1f\x8b\x08", "", ("a.jsonl.gz: damaged",)),
    ("a.jsonl", PAIR, "columns: prompt", ("8:14", "'prompt' is no pair", "prompt=question, comp")),
    ("a.jsonl", PAIR, "columns: promt=a", ("8:14", "there is no 'promt'", "did you mean prompt?")),
    ("a.jsonl", PAIR, "columns: prompt=x", ('no text under "x"', 'expected {"x": "…", "com')),
    ("a.jsonl", PAIR, "split: test", ("8:12", "no dataset of the hub", "leave it out")),
]


@pytest.mark.parametrize(
    ("name", "content", "more", "words"),
    BAD,
    ids=[f"{number}-{case[0]}" for number, case in enumerate(BAD)],
)
def test_data_that_cannot_be_read_is_refused_in_the_plan(
    tmp_path: Path,
    name: str,
    content: bytes | None,
    more: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    Path("g.yaml").write_text(GRID.format(name=name, more=more))
    assert main(["plan", "g.yaml"]) == 2
    said = capsys.readouterr().err
    assert not [word for word in words if word not in said], said
    assert said.startswith("nightgrid plan: g.yaml:") and "1 problem; nothing was" in said
