"""``nightgrid dataset``: AdvertiseGen files in, a description and tiny.json out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.main import main
from workloads.data.datasets import load_examples
from workloads.data.lengths import write_synthetic
from workloads.data.shapes import Example, write_json_lines
from workloads.models import loading


class Characters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, texts: list[str], **_: Any) -> dict:
        return {"input_ids": [list(range(len(text))) for text in texts]}


@pytest.fixture
def by_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count characters, so that lengths can be checked by hand and no model is needed."""
    embedded = SimpleNamespace(entry=SimpleNamespace(kind="embedded"))
    monkeypatch.setattr(loading, "open_model", lambda name: embedded)
    monkeypatch.setattr(loading, "load_tokenizer", lambda source: Characters())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An AdvertiseGen directory of 300 + 1 examples with totals 3, 4, … 303."""
    directory = tmp_path / "AdvertiseGen"
    train = [Example(content="类型", summary="x" * (n + 1)) for n in range(300, 0, -1)]
    write_json_lines(directory / "train.json", train)
    write_json_lines(directory / "dev.json", [Example(content="类型", summary="x")])
    return directory


def run(*arguments: object) -> int:
    return main(["dataset", *map(str, arguments)])


@pytest.mark.usefixtures("by_character")
def test_files_in_tiny_out(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("advertisegen", directory, "--tiny", tmp_path / "tiny.json") == 0
    printed = capsys.readouterr().out
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


@pytest.mark.usefixtures("by_character")
def test_json_for_machines(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = tmp_path / "tiny.json"
    assert run("advertisegen", directory, "--tiny", tiny, "--count", 7, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["counts"] == {"train.json": 300, "dev.json": 1}
    assert report["total"]["percentiles"]["median"] == 153
    assert sum(b["count"] for b in report["output"]["bins"]) == 301
    assert (report["tiny_count"], report["synthetic"]) == (7, False)
    assert len(load_examples(str(tiny))) == 7


@pytest.mark.usefixtures("by_character")
def test_nothing_is_overwritten_unasked(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = tmp_path / "tiny.json"
    tiny.write_text("precious")
    assert run("advertisegen", directory, "--tiny", tiny) == 1
    assert "exists already; --force" in capsys.readouterr().err
    assert tiny.read_text() == "precious"
    assert run("advertisegen", directory, "--tiny", tiny, "--force") == 0
    assert len(load_examples(str(tiny))) == 100


@pytest.mark.usefixtures("by_character")
def test_a_directory_as_out_gets_a_tiny_json(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("advertisegen", directory, "--tiny", tmp_path / "out") == 0
    assert len(load_examples(str(tmp_path / "out" / "tiny.json"))) == 100


@pytest.mark.usefixtures("by_character")
def test_a_synthetic_set_can_be_tried_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("synthetic", tmp_path / "made", "--count", 500) == 0
    assert run("synthetic", tmp_path / "made", "--count", 500) == 1
    assert "--force" in capsys.readouterr().err
    assert run("advertisegen", tmp_path / "made", "--tiny", tmp_path / "tiny.json") == 0
    assert "SYNTHETIC" in capsys.readouterr().out
    sample = load_examples(str(tmp_path / "tiny.json"))
    assert len(sample) == 100 and all(example.synthetic for example in sample)


def test_a_synthetic_set_has_every_example_once(tmp_path: Path) -> None:
    assert write_synthetic(tmp_path, 1080) == {"train.json": 1070, "dev.json": 10}
    both = [e for name in ("train.json", "dev.json") for e in load_examples(str(tmp_path / name))]
    assert len(set(both)) == 1080


def test_bad_input_is_an_error_with_its_place(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (directory / "train.json").open("a") as file:
        file.write("{oops\n")
    assert run("advertisegen", directory) == 1
    assert "train.json:301: not JSON" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run("advertisegen", tmp_path / "empty") == 1
    assert "no train.json and no dev.json" in capsys.readouterr().err
    assert run("synthetic", tmp_path / "one", "--count", 1) == 1
    with pytest.raises(SystemExit):
        run("synthetic", tmp_path / "none", "--count", 0)


def test_real_tokens_of_the_embedded_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    write_synthetic(tmp_path, 120)
    assert run("advertisegen", tmp_path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    tokenizer = loading.load_tokenizer(loading.open_model("tiny-chatglm3"))
    examples = load_examples(str(tmp_path / "train.json")) + load_examples(
        str(tmp_path / "dev.json")
    )
    longest = max(len(tokenizer.encode(e.content, add_special_tokens=False)) for e in examples)
    assert report["input"]["percentiles"]["max"] == longest
    assert report["total"]["count"] == 120


@pytest.mark.usefixtures("by_character")
def test_any_dataset_has_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": r, "content": r} for r in ("user", "assistant", "user", "assistant")]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"turns": turns}) + "\n")
    assert run("lengths", path) == 1
    assert "has turns; expected the columns of one of these" in capsys.readouterr().err
    assert run("lengths", path, "--columns", "messages=turns", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["input"]["percentiles"]["max"] == len("user" + "assistant" + "user")
    assert report["output"]["percentiles"]["max"] == len("assistant")
