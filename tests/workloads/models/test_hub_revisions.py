"""Names of the hub, brought to commits: in plan, identity and cache, with and without a hub."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from local_hub import LocalHub, local_hub

from orchestrator.cli import models
from orchestrator.core.errors import GridError
from orchestrator.core.job import Job
from orchestrator.core.labels import labels_of
from orchestrator.driver.options import RunOptions
from orchestrator.driver.plan import grid_of
from orchestrator.grid.parser import load_grid
from orchestrator.store import files as run_files
from workloads.base import DataMissing
from workloads.data.datasets import Reading, load_dataset
from workloads.models import hub as client
from workloads.models.catalog import checkpoint_kind, find_model
from workloads.models.hub import Revisions
from workloads.models.loading import allowed, open_model, permitted
from workloads.registry import kind_of

GRID = """\
name: hub
experiments:
  - name: one
    workload: finetuning
    accelerator: CPU
    model: {model}
    dataset: {dataset}
    axes: {{batch_size: [1, 2]}}
"""


def model_files(size: int) -> dict[str, bytes]:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size}
    header = b"{}".ljust(size)
    weights = len(header).to_bytes(8, "little") + header
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    files = {"config.json": config, "tokenizer.json": tokenizer}
    written = {name: json.dumps(content).encode() for name, content in files.items()}
    return {**written, "model.safetensors": weights}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub on loopback with an empty cache here."""
    import huggingface_hub.constants as constants

    with local_hub() as started:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", started.url)
        template = started.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        client.configuration_at.cache_clear()
        yield started


def write_grid(tmp_path: Path, model: str, dataset: str = "advertisegen-synthetic") -> Path:
    client.configuration_at.cache_clear()  # as in a process of its own
    (tmp_path / "grid.yaml").write_text(GRID.format(model=model, dataset=dataset))
    return tmp_path / "grid.yaml"


def planned(tmp_path: Path, model: str, *dataset: str) -> list[Job]:
    return list(load_grid(write_grid(tmp_path, model, *dataset)).jobs())


def test_a_branch_means_the_commit_that_it_has_when_it_is_planned(hub, tmp_path) -> None:
    first = hub.commit("models", "org/tiny", model_files(8))
    jobs = planned(tmp_path, "org/tiny")
    assert {job.model for job in jobs} == {f"org/tiny@{first}"}
    for same in (f"org/tiny@{first}", "org/tiny@main"):
        assert [job.job_id for job in planned(tmp_path, same)] == [job.job_id for job in jobs]
    second = hub.commit("models", "org/tiny", model_files(16))
    moved = planned(tmp_path, "org/tiny")
    assert {job.model for job in moved} == {f"org/tiny@{second}"}
    assert {job.job_id for job in moved}.isdisjoint(job.job_id for job in jobs)
    labels = {str(label) for label in labels_of([jobs[0], moved[0]]).values()}
    assert labels == {f"org/tiny@{first[:7]}", f"org/tiny@{second[:7]}"}
    source = open_model(jobs[0].model)
    assert Path(source.path).name == first
    assert (Path(source.path) / "model.safetensors").stat().st_size == 16
    with permitted(["org/tiny"]):
        assert allowed(jobs[0].model) and not allowed("org/other")


def test_without_a_hub_the_cache_tells_the_commit(hub, tmp_path, monkeypatch) -> None:
    commit = hub.commit("models", "org/tiny", model_files(8))
    open_model(Revisions().model("org/tiny"))
    asked = len(hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (
        Revisions().model("org/tiny")
        == Revisions().model(f"org/tiny@{commit}")
        == f"org/tiny@{commit}"
    )
    assert {job.model for job in planned(tmp_path, "org/tiny")} == {f"org/tiny@{commit}"}
    for missing in ("org/other", "org/tiny@v2"):
        with pytest.raises(DataMissing, match=rf"{missing} is not in the local cache .*OFFLINE"):
            Revisions().model(missing)
    assert len(hub.asked) == asked
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    client.configuration_at.cache_clear()
    assert Revisions().model("org/tiny") == f"org/tiny@{commit}"
    with pytest.raises(DataMissing, match=r"not in the local cache .* cannot be reached"):
        Revisions().model("org/other")


def test_a_repository_of_many_files_has_a_commit_too(hub: LocalHub) -> None:
    """The hub is asked for the commit alone."""
    files = dict.fromkeys((f"{number:064}" for number in range(16_000)), b"")
    commit = hub.commit("models", "org/large", files)
    assert Revisions().model("org/large") == f"org/large@{commit}"


def test_a_run_that_is_gone_on_with_keeps_its_commits(hub, tmp_path, capsys) -> None:
    first = hub.commit("models", "org/tiny", model_files(8))
    file = tmp_path / "mine.yaml"
    text = GRID.format(model="org/tiny", dataset="advertisegen-synthetic")
    text = text.replace("finetuning", "text-generation")
    file.write_text(f"results: {tmp_path / 'nights'}\n{text}")
    begun = grid_of(file, RunOptions())
    run = tmp_path / "nights" / begun.name
    run.mkdir(parents=True)
    (run / run_files.REVISIONS).write_text(json.dumps(begun.commits))
    (run / run_files.GRID).write_text(begun.text)
    (run / run_files.OPTIONS).write_text("{}")
    second = hub.commit("models", "org/tiny", model_files(16))
    client.configuration_at.cache_clear()
    again = RunOptions(resume=True)
    for source, options, commit in (
        (file, again, first),
        (run / run_files.GRID, again, first),
        (file, replace(again, name="another"), second),
        (file, RunOptions(), second),
    ):
        jobs = grid_of(source, options).jobs()
        assert {job.model for job in jobs} == {f"org/tiny@{commit}"}
    assert grid_of(file, again).commits == begun.commits
    parser = argparse.ArgumentParser()
    models.add_verify_arguments(parser)
    nights, elsewhere = (("--results", str(tmp_path / place)) for place in ("nights", "elsewhere"))
    for source, words, commit in (
        (run / run_files.GRID, elsewhere, first),
        (file, (), first),  # where the grid says
        (file, nights, first),
        (file, (*nights, "--run", begun.name), first),
        (file, (*nights, "--run", "another"), second),
        (file, elsewhere, second),
    ):
        asked = models.questions(parser.parse_args([str(source), *words]))
        assert [each["model"] for each in asked["experiments"]] == [f"org/tiny@{commit}"]
        assert asked["results"] == str(tmp_path / "nights")
        told = "was begun with org/tiny@main, so what is verified is the commit of today"
        assert (told in capsys.readouterr().err) == (commit == second)
    assert asked["name"] == f"verify-{begun.name}"


def test_a_hub_that_refuses_to_answer_stops_no_grid_whose_models_are_here(hub, tmp_path) -> None:
    commit = hub.commit("models", "org/tiny", model_files(8))
    open_model(Revisions().model("org/tiny"))
    for status in (401, 403, 407, 429, 500, 503):
        hub.refuses_with = status
        grid = load_grid(write_grid(tmp_path, "org/tiny"))
        assert {job.model for job in grid.jobs()} == {f"org/tiny@{commit}"}
        (note,) = grid.notes
        assert f"org/tiny is {commit[:7]} by the local cache" in note and str(status) in note
        with pytest.raises(DataMissing, match=rf"org/other is not in the local cache .*{status}"):
            Revisions().model("org/other")


def test_what_a_proxy_answers_names_the_proxy(hub: LocalHub, monkeypatch) -> None:
    """A proxy's 403 read like that of a private model, whose remedy is HF_TOKEN."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", hub.url.replace("://", "://me:word@"))
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    monkeypatch.setattr("urllib.request._opener", None)  # it keeps the proxies of its first use
    hub.refuses_with = 403
    at = re.escape(hub.url.removeprefix("http://"))
    with pytest.raises(
        DataMissing, match=f"403.* by way of the proxy {at}; .*no_proxy=hub.example"
    ):
        Revisions().model("org/tiny")
    hub.refuses_with = 407
    client.configuration_at.cache_clear()
    with pytest.raises(DataMissing, match="407, the proxy wants a user and password"):
        Revisions().model("org/tiny")


def test_a_revision_that_is_not_there_is_an_error_of_the_grid(hub, tmp_path) -> None:
    hub.commit("models", "org/tiny", model_files(8))
    with pytest.raises(
        GridError, match=r"org/tiny@v9: .*has no model of this .*; if a path was meant"
    ):
        planned(tmp_path, "org/tiny@v9")
    with pytest.raises(
        GridError, match=r"dataset org/none: .*has no dataset of this name .*; if a path was meant"
    ) as found:
        planned(tmp_path, "org/tiny", "org/none")
    assert [problem.line for problem in found.value.problems] == [7]


def test_a_dataset_of_the_hub_is_read_at_its_commit(hub, tmp_path, monkeypatch, nightgrid) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub.commit("models", "org/tiny", model_files(8))
    lines = [json.dumps({"instruction": f"{n}?", "output": "one"}) for n in range(4)]
    first = hub.commit("datasets", "org/asked", {"train.jsonl": "\n".join(lines).encode()})
    jobs = planned(tmp_path, "org/tiny", "org/asked")
    assert {dict(job.parameters)["revision"] for job in jobs} == {first}
    assert Revisions().of("datasets", "org/asked", first) == first
    hub.commit("datasets", "org/asked", {"train.jsonl": lines[0].encode()})
    assert dict(planned(tmp_path, "org/tiny", "org/asked")[0].parameters)["revision"] != first
    read = load_dataset("org/asked", Reading(split="train[1:]", revision=first))
    assert [example.content for example in read.examples] == ["1?", "2?", "3?"]
    with pytest.raises(DataMissing, match="split nothing"):
        load_dataset("org/asked", Reading(split="nothing", revision=first))
    assert nightgrid("dataset", "lengths", "org/asked", "--json").json["counts"] == {"org/asked": 1}
    hub.refuses_with = 503
    error = nightgrid("dataset", "lengths", "org/other", code=1).err
    assert "org/other is not in the local cache" in error and "503" in error
    assert "if a path was meant" in error


@pytest.mark.parametrize(
    ("config", "status", "words"),
    [
        (None, 0, "has no such model"),
        (b"{}", 401, "HF_TOKEN"),
        (b"[]", 0, "no usable"),
        (b"[" * 2**19, 0, "cannot be reached"),
        (b'{"architectures": ["%s"]}' % (b"x" * 2**20), 0, "answers with more than 1 MiB"),
    ],
    ids=["not there", "not allowed", "no model", "too deep", "endless"],
)
def test_a_hub_that_answers(hub, config, status, words):
    if config is not None:
        hub.commit("models", "org/name", {"config.json": config})
    hub.refuses_with = status
    with pytest.raises(DataMissing, match=words):
        find_model("org/name")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"architectures": ["Qwen2ForCausalLM"]}),
        ("model_index.json", {"_class_name": "SomePipeline", "scheduler": ["x", "Y"]}),
    ],
)
def test_a_model_or_a_pipeline_on_the_hub(hub, file, content):
    hub.commit("models", "org/name", {file: json.dumps(content).encode()})
    entry = find_model("org/name")
    assert entry.location == "org/name" and entry.checkpoint == kind_of(content)
    assert checkpoint_kind("org/name") == entry.checkpoint
