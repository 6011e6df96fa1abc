"""Prompts as jobs will read them: the plan says which the template refuses and which are long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest

from orchestrator.cli.main import main
from workloads.models import prompt_look
from workloads.models.loading import load_tokenizer, open_model
from workloads.models.prompts import encode_prompt

#: As Mistral's: turns of user and assistant alternate.
ALTERNATING = """{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"""
ANSWERED = {"role": "assistant", "content": "yes"}
PLAIN = {"messages": [{"role": "user", "content": "hi"}, ANSWERED]}
WITH_SYSTEM = {"messages": [{"role": "system", "content": "be brief"}, *PLAIN["messages"]]}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.make_good(tmp_path_factory.mktemp("models") / "good")


def write(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def plan(directory: Path, settings: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of a plan of one experiment."""
    lines = [
        "name: g",
        "defaults: {accelerator: CPU, precision: fp32, model: good, dataset: data.jsonl}",
        "experiments:",
        f"  - {{name: a, {settings}}}",
    ]
    (directory / "g.yaml").write_text("\n".join(lines))
    code = main(["plan", "g.yaml", "--emulate", "1x1:CPU"])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize(
    ("rule", "code", "words"),
    [
        ("error", 2, "too_long: error: 1 of 4 prompts of data.jsonl leave good no room"),
        ("cut", 0, "1 of 3 prompts of data.jsonl with good are too long and cut"),
        ("skip", 0, "1 of 4 prompts of data.jsonl with good are too long and left out"),
    ],
)
def test_the_plan_says_which_prompts_are_too_long(
    rule: str,
    code: int,
    words: str,
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    cases.copied(good, tmp_path / "good")
    write(tmp_path / "data.jsonl", [{"text": "x" * (80 if n == 2 else 5)} for n in range(9)])
    settings = f"workload: text-generation, prompts: 3, output_tokens: 4, too_long: {rule}"
    if rule == "error":
        settings = settings.replace("prompts: 3", "prompts: 4")
    ended, said = plan(tmp_path, settings, capsys)
    assert ended == code and words in said, said
    assert "data.jsonl:3 has 87 tokens, and there is room for 60" in said


@pytest.mark.parametrize(
    "workload",
    [
        "text-generation, prompts: 9, output_tokens: 4",
        "finetuning, samples: 9, max_length: 32",
    ],
)
@pytest.mark.parametrize(("odd", "code"), [(1, 0), (5, 2)])
def test_every_conversation_is_rendered_and_what_the_template_refuses_is_counted(
    workload: str,
    odd: int,
    code: int,
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    cases.copied(good, tmp_path / "good", cases.written(cases.TEMPLATE, ALTERNATING))
    write(tmp_path / "data.jsonl", [PLAIN] * 4 + [WITH_SYSTEM] * odd)
    ended, said = plan(tmp_path, f"workload: {workload}", capsys)
    assert ended == code, said
    assert f"{odd} of" in said and "data.jsonl:5: roles must alternate" in said


@pytest.mark.parametrize("template", [True, False])
def test_lengths_are_those_that_jobs_count(template: bool, good: Path, tmp_path: Path) -> None:
    changes = [] if template else [cases.without(cases.TEMPLATE)]
    model = cases.copied(good, tmp_path / "model", *changes)
    source = open_model(str(model))
    tokenizer = load_tokenizer(source)
    for text in ("word " * 20, "äöü 你好 " * 9, "[user]</s>" * 7):
        write(tmp_path / "data.jsonl", [{"text": text}])
        options = {"count": 1, "learned": False, "skips": False}
        how = {"columns": "", "split": "train"}
        counted = len(encode_prompt(tokenizer, source, text)) - (not template)  # less the first
        for room, long in ((counted, 0), (counted - 1, 1)):
            look = prompt_look.examine(
                str(model), str(tmp_path / "data.jsonl"), how, room=room, **options
            )
            assert (look["long"], look["unknown"]) == (long, 0), (text, room)


def test_the_look_ends_in_time_and_says_so(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data.jsonl", [{"text": "x"}] * 9)
    monkeypatch.setattr(prompt_look, "LOOK_S", -1.0)
    how = {"columns": "", "split": "train"}
    options = {"count": 9, "room": 9, "learned": False, "skips": False}
    assert prompt_look.examine(str(good), str(tmp_path / "data.jsonl"), how, **options)["ended"]


def test_a_model_without_tokenizer_json_counts_when_it_loads(good: Path, tmp_path: Path) -> None:
    model = cases.copied(good, tmp_path / "model", cases.without(cases.TOKENIZER))
    write(tmp_path / "data.jsonl", [{"text": "x" * 99}, {"text": "y"}])
    how = {"columns": "", "split": "train"}
    options = {"count": 9, "room": 50, "learned": False, "skips": False}
    look = prompt_look.examine(str(model), str(tmp_path / "data.jsonl"), how, **options)
    assert (look["count"], look["unknown"], look["long"]) == (2, 1, 0)
