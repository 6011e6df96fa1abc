"""Tasks: which checkpoint is of which kind, and which workload takes it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.core.errors import GridError
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Node
from orchestrator.grid.parser import parse_grid
from orchestrator.planning.planner import make_plan
from workloads.base import BadConfiguration, Unsupported
from workloads.models.catalog import EMBEDDED, MADE, checkpoint_kind, find_model
from workloads.registry import (
    TASKS,
    WORKLOADS,
    kind_of,
    task_for,
    task_of,
)

BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 32}
T5 = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
STABLE_DIFFUSION = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2D"]}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
UNKNOWN = {"architectures": ["NobodyKnows"], "model_type": "falcon"}


def write(directory: Path, config: Mapping[str, Any], name: str = "config.json") -> str:
    """A checkpoint of this kind, with weights that nobody has to read."""
    directory.mkdir()
    (directory / name).write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
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
        (STABLE_DIFFUSION, "text-to-image"),
        ({"architectures": ["UNet2DConditionModel"]}, None),
        (UNKNOWN, None),
        # A pipeline by its index alone; an encoder with a decoder by saying so, else by its family.
        ({"_class_name": "New", "vae": ["a", "B"], "model_type": "t5"}, "text-to-image"),
        ({"architectures": ["NewForMaskedLM"], "is_encoder_decoder": True}, "seq2seq-lm"),
        ({"architectures": ["ForMaskedLMBert"], "model_type": "x"}, None),
        ({}, None),
    ],
)
def test_a_config_tells_the_kind_of_a_model(config: Mapping[str, Any], task: str | None) -> None:
    """Class before family; what neither tells is left to the job."""
    spec = task_of(kind_of(config))
    assert (spec.name if spec else None) == task


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_embedded_models_are_what_they_say(name: str) -> None:
    """The table's kind is that of the files which are made from it, and a workload takes it."""
    assert checkpoint_kind(name) == EMBEDDED[name]
    task = task_of(EMBEDDED[name])
    assert task is not None and any(task.name in entry.tasks for entry in WORKLOADS.values())
    if name in MADE:
        config = importlib.import_module(MADE[name]).config()
        assert kind_of(config) == EMBEDDED[name] and config["random_weights"]


def grid(model: str, workload: str, **more: Any) -> bytes:
    one = {"name": "one", "workload": workload, "model": model, "accelerator": "CPU", **more}
    return json.dumps({"name": "g", "experiments": [one]}).encode()


@pytest.mark.parametrize(
    ("config", "workload", "words", "fits"),
    [
        (
            BERT,
            "text-generation",
            "it is a masked language model (BertForMaskedLM), and text-generation takes a causal",
            "onnx-calibration or pretraining or text-encoding",
        ),
        (STABLE_DIFFUSION, "finetuning", "it is a text-to-image pipeline", "text-to-image"),
        (
            LLAMA,
            "pretraining",
            "it is a causal language model",
            "finetuning or onnx-calibration or quantization or serving or text-generation or "
            "verification",
        ),
        (T5, "verification", "takes a causal language model", "finetuning or text-generation"),
    ],
)
def test_a_model_of_another_kind_is_refused(tmp_path, config, workload, words, fits) -> None:
    """With the workloads that fit, without those that plans add by themselves."""
    file = "model_index.json" if config is STABLE_DIFFUSION else "config.json"
    model = write(tmp_path / "m", config, file)
    with pytest.raises(GridError) as error:
        parse_grid(grid(model, workload), "g")
    (problem,) = error.value.problems
    assert problem.path == "experiments[0].model" and words in problem.message
    assert problem.hint == f"write workload: {fits}"
    with pytest.raises(BadConfiguration, match=r"takes a"):
        task_for(workload, find_model(model))


@pytest.mark.parametrize(
    ("config", "workload"), [(BERT, "pretraining"), (UNKNOWN, "text-generation")]
)
def test_a_model_that_fits_or_whose_kind_cannot_be_told_is_planned(tmp_path, config, workload):
    """The job itself will look: transformers compares files of safetensors only."""
    model = write(tmp_path / "m", config)
    if config is UNKNOWN:
        (tmp_path / "m" / "model.safetensors").unlink()
        torch.save({}, tmp_path / "m" / "pytorch_model.bin")
    node = Node(node_id="n", name="n", accelerator=Accelerator.CPU, card_indices=(0,))
    text = grid(model, workload, precision="fp32")
    plan = make_plan(parse_grid(text, "g"), [node], [])
    assert [str(item.action) for item in plan.jobs] == ["run"]


def test_a_technique_that_a_task_has_no_function_for_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="a masked language model has no function 'pack'"):
        TASKS["masked-lm"].function("pack")
