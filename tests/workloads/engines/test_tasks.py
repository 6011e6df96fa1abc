"""Tasks: which checkpoint is of which kind, and which workload takes it."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import GridError
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Node
from orchestrator.grid.parser import parse_grid
from orchestrator.planning.planner import make_plan
from workloads.base import BadConfiguration, Unsupported
from workloads.engines import ENGINES
from workloads.inspection.checkpoints import CheckpointKind, kind_of
from workloads.models.catalog import EMBEDDED, MADE, checkpoint_kind, find_model
from workloads.registry import TASKS, WORKLOADS, TaskSpec, task_for, task_of

ROOT = Path(__file__).resolve().parents[3]
BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 32}
T5 = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
STABLE_DIFFUSION = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2D"]}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def write(directory: Path, config: Mapping[str, Any], name: str = "config.json") -> str:
    """A checkpoint of this kind, with weights that nobody has to read."""
    directory.mkdir()
    (directory / name).write_text(json.dumps(config))
    (directory / "model.safetensors").touch()
    (directory / "tokenizer.json").touch()
    return str(directory)


@pytest.mark.parametrize(
    ("config", "task"),
    [
        (LLAMA, "causal-lm"),
        ({"architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
        ({"architectures": ["ChatGLMModel"], "model_type": "chatglm"}, "causal-lm"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "causal-lm"),
        ({"model_type": "llama"}, "causal-lm"),
        (BERT, "masked-lm"),
        ({"architectures": ["BertForPreTraining"], "model_type": "bert"}, "masked-lm"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "masked-lm"),
        (T5, "seq2seq-lm"),
        ({"architectures": ["T5WithLMHeadModel"], "is_encoder_decoder": True}, "seq2seq-lm"),
        ({"architectures": ["BartForCausalLM"], "model_type": "bart"}, "causal-lm"),
        ({"model_type": "t5"}, "seq2seq-lm"),
        ({"architectures": ["NobodyKnows"], "model_type": "new"}, None),
        ({}, None),
    ],
)
def test_a_config_tells_the_kind_of_a_model(config: Mapping[str, Any], task: str | None) -> None:
    """Class before family; what neither tells is left to the job."""
    found = task_of(kind_of(config))
    assert (found.name if found else None) == task


_KINDS = {
    "masked": TaskSpec(name="m", title="", architectures=("ForMasked",), model_types={"a"}),
    "encoder-decoder": TaskSpec(
        name="s", title="", architectures=("Special",), model_types={"b"}, encoder_decoder=True
    ),
    "pipeline": TaskSpec(name="p", title="", architectures=("Pipe",), pipeline=True),
}


@pytest.mark.parametrize(
    ("kind", "takers"),
    [
        ({"architecture": "BertForMasked"}, ["masked"]),
        ({"architecture": "ForMaskedBert", "model_type": "a"}, []),
        ({"architecture": "BertForMasked", "encoder_decoder": True}, ["encoder-decoder"]),
        ({"architecture": "TSpecial"}, []),
        ({"architecture": "TSpecial", "model_type": "b"}, ["encoder-decoder"]),
        ({"architecture": "BertForMasked", "model_type": "b"}, ["masked", "encoder-decoder"]),
        ({"architecture": "TSpecial", "encoder_decoder": True}, ["encoder-decoder"]),
        ({"architecture": "Anything", "pipeline": True}, ["pipeline"]),
        ({"architecture": "BertForMasked", "pipeline": True, "model_type": "b"}, ["pipeline"]),
        ({"architecture": "XPipe"}, []),
    ],
)
def test_a_task_takes_what_it_declares(kind: dict[str, Any], takers: list[str]) -> None:
    """A pipeline by its index; an encoder with a decoder by saying so, else by its family; all
    others by the end of their class."""
    found = [name for name, spec in _KINDS.items() if spec.takes(CheckpointKind(**kind))]
    assert found == takers


def test_a_pipeline_is_told_by_its_index(tmp_path: Path) -> None:
    """A directory of several models has no config.json of its own."""
    model = write(tmp_path / "sd", STABLE_DIFFUSION, "model_index.json")
    assert find_model(model).architecture == "StableDiffusionPipeline"
    found = task_of(kind_of(STABLE_DIFFUSION))
    assert found is not None and found.name == "text-to-image"
    assert task_of(kind_of({"architectures": ["UNet2DConditionModel"]})) is None


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_embedded_models_are_what_they_say(name: str) -> None:
    """The table's kind is that of the files which are made from it, and a workload takes it."""
    assert checkpoint_kind(name) == EMBEDDED[name]
    task = task_of(EMBEDDED[name])
    assert task is not None and any(task.name in entry.tasks for entry in WORKLOADS.values())


@pytest.mark.parametrize("name", MADE)
def test_the_embedded_kind_is_that_of_the_files(name: str) -> None:
    """What the table says of a model with random weights is what its JSON file says."""
    maker = importlib.import_module(MADE[name])
    config = maker.config()
    assert kind_of(config) == EMBEDDED[name] and config["random_weights"]


def grid(model: str, workload: str, **more: Any) -> bytes:
    one = {"name": "one", "workload": workload, "model": model, "accelerator": "CPU", **more}
    return json.dumps({"name": "g", "experiments": [one]}).encode()


@pytest.mark.parametrize("workload", ["text-generation", "finetuning", "verification"])
@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (BERT, "config.json", "it is a masked language model (BertForMaskedLM), and "),
        (STABLE_DIFFUSION, "model_index.json", "it is a text-to-image pipeline"),
    ],
)
def test_the_plan_refuses_a_model_of_another_kind(
    tmp_path: Path, workload: str, config: Mapping[str, Any], name: str, words: str
) -> None:
    """A grid with one starts nothing; the message stands where the model does."""
    model = write(tmp_path / "m", config, name)
    with pytest.raises(GridError) as found:
        parse_grid(grid(model, workload), "g")
    (problem,) = found.value.problems
    assert problem.path == "experiments[0].model" and words in problem.message
    assert "takes a causal language model" in problem.message
    with pytest.raises(BadConfiguration, match="takes a causal language model"):
        task_for(workload, find_model(model))


def test_a_pair_of_texts_is_nothing_to_verify(tmp_path: Path) -> None:
    """A workload of causal models alone refuses one with an encoder, and names those that run."""
    with pytest.raises(GridError) as found:
        parse_grid(grid(write(tmp_path / "m", T5), "verification"), "g")
    (problem,) = found.value.problems
    assert "it is a sequence-to-sequence model (T5ForConditionalGeneration)" in problem.message
    assert "finetuning" in problem.hint


def test_the_workload_that_fits_is_named(tmp_path: Path) -> None:
    """Each message names the workloads that take such a model."""
    bert, llama = write(tmp_path / "bert", BERT), write(tmp_path / "llama", LLAMA)
    for model, workload, fits in (
        (
            bert,
            "text-generation",
            "write workload: onnx-calibration or pretraining or text-encoding",
        ),
        (
            llama,
            "pretraining",
            "write workload: finetuning or onnx-calibration or quantization or text-generation or "
            "verification",
        ),
    ):
        with pytest.raises(GridError) as found:
            parse_grid(grid(model, workload), "g")
        (problem,) = found.value.problems
        assert problem.hint == fits  # without what plans add by themselves
    assert parse_grid(grid(bert, "pretraining", precision="fp32"), "g").jobs()


def test_a_model_whose_kind_cannot_be_told_is_planned(tmp_path: Path) -> None:
    """The job itself will look."""
    model = write(tmp_path / "m", {"architectures": ["NobodyKnows"], "model_type": "new"})
    node = Node(node_id="n", name="n", accelerator=Accelerator.CPU, card_indices=(0,))
    plan = make_plan(parse_grid(grid(model, "text-generation", precision="fp32"), "g"), [node], [])
    assert [str(item.action) for item in plan.jobs] == ["run"]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_holds_together(name: str) -> None:
    """What it names is there, and it says how to tell its checkpoints."""
    spec = TASKS[name]
    assert spec.title and (spec.architectures or spec.model_types or spec.pipeline)
    for function in spec.functions.values():
        module, _, wanted = function.partition(":")
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        assert wanted in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    families = [spec.model_types for spec in TASKS.values()]
    assert sum(map(len, families)) == len(frozenset().union(*families))


def test_workloads_run_tasks_that_have_all_that_it_takes() -> None:
    """No workload names a task that nobody can load, or train where that is what it does."""
    for entry in WORKLOADS.values():
        learns = {"encode", "collate", "loss"} if entry.ability == "train" else set()
        for name in entry.tasks:
            assert {"load", *learns} <= set(TASKS[name].functions)


def _source(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text()


def _sources(module: str) -> list[str]:
    """The module, those of its own folder that it calls, and those that export a graph for them:
    each may hand the loading over."""
    source = _source(module)
    folder = re.escape(module.rpartition(".")[0])
    others = set(re.findall(rf"from ({folder}\.\w+) import", source))
    others |= set(re.findall(r"from (\S+) import load\b", source))
    for other in sorted(others):
        others |= set(re.findall(r"from (\S+\.exports) import", _source(other)))
    return [source, *map(_source, sorted(others - {module}))]


@pytest.mark.parametrize("name", ENGINES.own)
def test_a_model_is_loaded_by_its_task_unless_the_engine_says_otherwise(name: str) -> None:
    """What a model is loaded as is the task's to say: no engine picks a class of transformers, and
    only one that declares so opens checkpoints by itself."""
    spec = ENGINES[name]
    loaders = [spec.abilities[each] for each in ("generate", "images") if each in spec.abilities]
    assert loaders
    for loader in loaders:
        sources = _sources(loader.function.partition(":")[0])
        assert any('.function("load")' in source for source in sources) is not spec.own_loader
        source = "".join(sources)
        assert "AutoModel" not in source


def test_a_technique_that_a_task_has_no_function_for_is_unsupported() -> None:
    """The message names the task and what it lacks."""
    with pytest.raises(Unsupported, match="a masked language model has no function 'pack'"):
        TASKS["masked-lm"].function("pack")
