"""Models that jobs save under a name: found by other jobs, and the same model again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_cases import asked, refuse, train
from generation_cases import Worker
from generation_cases import request as generation
from patience import patience

from workloads import text_generation
from workloads.models import products
from workloads.models.catalog import find_model
from workloads.models.loading import load_causal_model, load_tokenizer, open_model
from workloads.models.products import ATTEMPT, ORIGIN, SAVED_BY, Saving, saving_of

pytestmark = pytest.mark.usefixtures("shared")


@pytest.mark.slow
def test_a_saved_model_is_the_trained_one_and_generates(shared, monkeypatch) -> None:
    trained: list[torch.Tensor] = []
    save = products.save_trained

    def watching(model: torch.nn.Module, *rest: Any, **options: Any) -> Path:
        trained.extend(parameter.detach().clone() for parameter in model.parameters())
        return save(model, *rest, **options)

    monkeypatch.setattr("workloads.training.loop.save_trained", watching)
    result = train(method="full", steps=1, samples=4, save_model="tuned", learning_rate=0.1)
    assert result.details["saved_model"] == str(shared / "tuned")
    origin = json.loads((shared / "tuned" / ORIGIN).read_text())
    assert origin["model"] == "tiny-chatglm3" and origin["method"] == "full"
    source = open_model("tuned")
    assert source.random_weights, "a step of training makes no sense of random weights"
    again = load_causal_model(source, dtype=torch.float32)
    for kept, was in zip(again.parameters(), trained, strict=True):
        torch.testing.assert_close(kept, was, rtol=0, atol=0)
    before = load_tokenizer(open_model("tiny-chatglm3"))
    assert load_tokenizer(source)("类型#裤")["input_ids"] == before("类型#裤")["input_ids"]
    made = text_generation.run(
        generation("advertisegen-synthetic", model="tuned", prompts=1, output_tokens=2),
        Worker().context(),
    )
    assert len(made.samples) > 0


def test_what_a_library_wrote_of_random_weights_is_random(shared: Path, tmp_path: Path) -> None:
    source = open_model("tiny-chatglm3")
    model = load_causal_model(source)
    del model.config.random_weights
    model.save_pretrained(tmp_path)
    assert "random_weights" not in json.loads((tmp_path / "config.json").read_text())
    products.save_trained(model, source, "by-library", {}, written=tmp_path)
    assert find_model("by-library").random_weights
    assert (shared / "by-library/model.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()


def _killed_while_replacing(final: Path, renames: int) -> None:
    """Keep a model again, and die by SIGKILL before the rename after so many."""
    rename, done = Path.rename, []

    def watched(self: Path, to: Path) -> Path:
        if len(done) == renames:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(self)
        return rename(self, to)

    Path.rename = watched  # type: ignore[method-assign]
    products.save_product("model", final.name, {}, lambda to: _config(to, "new"))


def _config(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(json.dumps({"said": text}))


@pytest.mark.parametrize("renames", [0, 1])
def test_a_job_that_is_killed_while_it_replaces_a_model_loses_neither_name_nor_room(
    shared: Path, renames: int
) -> None:
    final = shared / f"replaced-{renames}"
    products.save_product("model", final.name, {}, lambda to: _config(to, "old"))
    job = multiprocessing.get_context("fork").Process(
        target=_killed_while_replacing, args=(final, renames)
    )
    job.start()
    job.join(patience(30))
    assert job.exitcode == -signal.SIGKILL
    assert final.exists() is (renames == 0)
    assert products.find_saved(final.name) == final
    assert json.loads((final / "config.json").read_text()) == {"said": "old"}
    products.save_product("model", final.name, {}, lambda to: _config(to, "newer"))
    assert json.loads((final / "config.json").read_text()) == {"said": "newer"}
    beside = {path.name for path in shared.glob(f".{final.name}.*")}
    assert beside == {f".{final.name}.lock"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"method": "full", "save_model": "tiny-bert"}, "embedded model"),
        ({"method": "full", "save_model": "tests"}, "there is a directory tests"),
        ({"method": "lora", "save_model": "m"}, "trains an adapter"),
        ({"method": "qat", "save_model": "m"}, "int4 weights"),
    ],
)
def test_only_whole_models_are_saved_and_under_names_of_their_own(given, reason) -> None:
    found = [one for one in refuse(asked(**given)) if one.setting == "save_model"]
    assert any(reason in one.reason and one.hint for one in found)


def leave_note(root: Path, name: str, saved_by: str, attempt: int) -> None:
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ORIGIN).write_text(json.dumps({SAVED_BY: saved_by, ATTEMPT: attempt}))


def test_a_name_is_looked_up_anew_wherever_models_are_kept_now(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NIGHTGRID_MODELS", str(tmp_path / "one"))
    assert saving_of("model", "mine") == Saving()
    leave_note(tmp_path / "one", "mine", "run-job", 1)
    assert saving_of("model", "mine") == Saving("run-job", 1)
    leave_note(tmp_path / "one", "mine", "run-job", 2)
    assert saving_of("model", "mine") == Saving("run-job", 2)
    monkeypatch.setenv("NIGHTGRID_MODELS", str(tmp_path / "other"))
    assert saving_of("model", "mine") == Saving()
    monkeypatch.setenv("NIGHTGRID_MODELS", str(tmp_path / "one"))
    assert saving_of("model", "mine") == Saving("run-job", 2)
    leave_note(tmp_path, "elsewhere", "run-other", 3)
    assert saving_of("model", str(tmp_path / "elsewhere")) == Saving("run-other", 3)
    assert saving_of("adapter", "mine") == Saving()
