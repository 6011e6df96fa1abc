"""Prompts as jobs will read them: the plan says which the template refuses and which are long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest

from workloads.inspection.tokenizers import fast_tokenizer
from workloads.models import prompts
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


def plan(directory: Path, settings: str) -> Path:
    """A grid of one experiment."""
    lines = [
        "name: g",
        "defaults: {accelerator: CPU, precision: fp32, model: good, dataset: data.jsonl}",
        "experiments:",
        f"  - {{name: a, {settings}}}",
    ]
    (directory / "g.yaml").write_text("\n".join(lines))
    return directory / "g.yaml"


@pytest.mark.parametrize(
    ("rule", "prompts", "code", "words"),
    [
        ("error", 4, 2, "too_long: error: 1 of 4 prompts of data.jsonl leave good no room"),
        ("cut", 3, 0, "1 of 3 prompts of data.jsonl with good are too long and cut"),
        ("skip", 3, 0, "1 of 4 prompts of data.jsonl with good are too long and left out"),
    ],
)
def test_the_plan_says_which_prompts_are_too_long(
    rule, prompts, code, words, good, tmp_path, nightgrid, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases.copied(good, tmp_path / "good")
    write(tmp_path / "data.jsonl", [{"text": "x" * (80 if n == 2 else 5)} for n in range(9)])
    settings = f"workload: text-generation, prompts: {prompts}, output_tokens: 4, too_long: {rule}"
    said = nightgrid("plan", plan(tmp_path, settings), "--emulate", "1x1:CPU", code=code).all
    assert words in said and "data.jsonl:3 has 87 tokens, and there is room for 60" in said, said


@pytest.mark.parametrize(
    "workload",
    [
        "text-generation, prompts: 9, output_tokens: 4",
        "finetuning, samples: 9, max_length: 32",
    ],
)
@pytest.mark.parametrize(("odd", "code"), [(1, 0), (5, 2)])
def test_every_conversation_is_rendered_and_what_the_template_refuses_is_counted(
    workload, odd, code, good, tmp_path, nightgrid, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases.copied(good, tmp_path / "good", cases.written(cases.TEMPLATE, ALTERNATING))
    write(tmp_path / "data.jsonl", [PLAIN] * 4 + [WITH_SYSTEM] * odd)
    grid = plan(tmp_path, f"workload: {workload}")
    said = nightgrid("plan", grid, "--emulate", "1x1:CPU", code=code).all
    assert f"{odd} of" in said and "data.jsonl:5: roles must alternate" in said


HOW = {"columns": "", "split": "train"}
LOOK = {"count": 9, "learned": False, "skips": False}


@pytest.mark.parametrize("template", [True, False])
def test_lengths_are_those_that_jobs_count(template: bool, good: Path, tmp_path: Path) -> None:
    changes = [] if template else [cases.without(cases.TEMPLATE)]
    model = cases.copied(good, tmp_path / "model", *changes)
    source, data = open_model(str(model)), tmp_path / "data.jsonl"
    tokenizer = load_tokenizer(source)
    for text in ("word " * 20, "äöü 你好 " * 9, "[user]</s>" * 7):
        write(data, [{"text": text}])
        counted = len(encode_prompt(tokenizer, source, text)) - (not template)  # less the first
        for room, long in ((counted, 0), (counted - 1, 1)):
            options = LOOK | {"count": 1, "room": room}
            look = prompts.examine_prompts(str(model), str(data), HOW, **options)
            assert (look["long"], look["unknown"]) == (long, 0), (text, room)


def test_texts_are_neither_cut_nor_padded_as_a_saved_tokenizer_says(good, tmp_path) -> None:
    """A tokenizer keeps the truncation and padding of the last call before it was saved."""
    tokenizer = load_tokenizer(open_model(str(good)))
    tokenizer("a", truncation=True, max_length=16, padding="max_length")
    tokenizer.save_pretrained(tmp_path)
    for text in ("a", "word " * 20):
        ids = fast_tokenizer(tmp_path).encode(text, add_special_tokens=False).ids
        assert ids == tokenizer(text, add_special_tokens=False).input_ids


def test_the_look_ends_in_time_and_says_so(good, tmp_path, monkeypatch) -> None:
    data = tmp_path / "data.jsonl"
    write(data, [{"text": "x"}] * 9)
    monkeypatch.setattr(prompts, "LOOK_S", -1.0)
    assert prompts.examine_prompts(str(good), str(data), HOW, room=9, **LOOK)["ended"]


def test_a_model_without_tokenizer_json_counts_when_it_loads(good: Path, tmp_path: Path) -> None:
    model = cases.copied(good, tmp_path / "model", cases.without(cases.TOKENIZER))
    data = tmp_path / "data.jsonl"
    write(data, [{"text": "x" * 99}, {"text": "y"}])
    look = prompts.examine_prompts(str(model), str(data), HOW, room=50, **LOOK)
    assert (look["count"], look["unknown"], look["long"]) == (2, 1, 0)
