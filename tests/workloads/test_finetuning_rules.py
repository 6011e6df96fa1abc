"""The rules of fine-tuning: what is wrong everywhere, and what one device cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from finetuning_cases import asked, refuse
from pydantic import ValidationError

from workloads.base import BadConfiguration
from workloads.engines import engine_refusals
from workloads.models import rules
from workloads.registry import find_workload
from workloads.training.methods import ADAPTER_METHODS

METHODS = ("full", "lora", "vera", "dora", "qlora", "qat", "qat-lora")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_allowed_on_every_device(method: str, device: str, precision: str) -> None:
    """In fp32 and bf16 all of them."""
    assert not refuse(asked(method=method, device=device, precision=precision))


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({"method": "full", "rank": 4}, "rank", "method full has no adapter"),
        ({"method": "qat", "save_adapter": "a"}, "save_adapter", "method qat has no adapter"),
        ({"method": "vera", "alpha": 4}, "alpha", "has no alpha"),
        ({"targets": "q_proj,kproj"}, "targets", "no linear layer is named kproj"),
        ({"targets": ","}, "targets", "no linear layer"),
        ({"gradient_accumulation": 3}, "gradient_accumulation", "cannot be cut into 3"),
        ({"gradient_accumulation": 8}, "gradient_accumulation", "cannot be cut into 8"),
        (
            {"batch_size": "max", "gradient_accumulation": 2},
            "gradient_accumulation",
            "what fits in one pass",
        ),
        ({"freeze_layers": 1}, "freeze_layers", "beside method: full or qat or distill"),
        ({"method": "dora", "freeze_embeddings": True}, "freeze_embeddings", "beside method: full"),
        ({"precision": "fp16"}, "precision", "plain fp16 ends in NaN"),
        ({"precision": "fp16", "autocast": "fp16", "method": "full"}, "precision", "fp16 weights"),
        ({"autocast": "fp16"}, "autocast", "lose range and precision"),
        ({"max_length": 8193}, "max_length", "8,193 tokens are more than the model's 8,192"),
        ({"packed_attention": "apart"}, "packed_attention", "beside padding: packing"),
        (
            {"padding": "packing", "packed_attention": "apart", "attention": "eager"},
            "packed_attention",
            "another one",
        ),
        ({"logits": "learned", "torch_compile": True}, "logits", "would be compiled"),
        ({"compile_scope": "layers"}, "compile_scope", "beside torch_compile: true"),
        ({"packed_length": "longest"}, "packed_length", "beside packed_attention: apart"),
        (
            {"adapter_products": "together", "method": "qlora"},
            "adapter_products",
            "beside method: lora",
        ),
        ({"logits": "chunked", "autocast": "bf16"}, "logits", "outside of autocast"),
        ({"logits": "chunked", "method": "qat-lora"}, "logits", "which QAT converts whole"),
    ],
)
def test_a_contradiction_is_wrong_on_every_device(
    changes: dict[str, Any], setting: str, words: str
) -> None:
    """The refusal names the setting and the reason, and is not a matter of the device."""
    for device in ("cpu", "cuda"):
        (refusal,) = refuse(asked(device=device, **changes))
        assert (refusal.setting, refusal.unsupported) == (setting, False)
        assert words in refusal.reason and refusal.hint


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"precision": "int8"}, "cpu", "weights in int8 have no gradients"),
        ({"precision": "int4"}, "cuda", "weights in int4 have no gradients"),
        ({"precision": "fp8"}, "cuda", "weights in fp8 have no gradients"),
        ({"optimizer": "adamw-8bit"}, "hpu", "what Gaudi lacks: 8-bit optimizers"),
        ({"optimizer": "adamw-8bit-paged"}, "cpu", "lacks: bitsandbytes moves"),
        (
            {"precision": "fp32", "autocast": "fp16"},
            "hpu",
            "what Gaudi lacks: torch's gradient scaler",
        ),
    ],
)
def test_what_a_device_cannot_do_is_unsupported(
    changes: dict[str, Any], device: str, words: str
) -> None:
    """It makes sense elsewhere, so it becomes a row with the reason."""
    (refusal,) = refuse(asked(device=device, **changes))
    assert refusal.unsupported and words in refusal.reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"rank": "8"},
        {"method": "prefix"},
        {"steps": 0},
        {"learning_rate": 0.0},
        {"save_adapter": "../elsewhere"},
        {"gradient_accumulation": 0},
        {"freeze_layers": -1},
        {"padding": "left"},
        {"optimizer": "sgd"},
        {"accumulate": 2},
    ],
)
def test_values_out_of_range_are_refused_by_themselves(wrong: dict[str, Any]) -> None:
    """Types, ranges and names are checked before any rule is asked."""
    with pytest.raises(ValidationError):
        find_workload("finetuning").validate(wrong)


def test_adapter_methods_are_the_ones_with_adapters() -> None:
    """A rank is refused for exactly the other methods."""
    refused = {m for m in METHODS if refuse(asked(method=m, rank=4))}
    assert refused == set(METHODS) - set(ADAPTER_METHODS)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({}, None),
        ({"cards": 2}, None),
        ({"method": "full"}, None),
        ({"method": "vera"}, "method"),
        ({"optimizer": "adafactor"}, "optimizer"),
    ],
)
def test_optimum_habana_s_trainer_runs_lora_and_all_weights_on_any_cards(
    changes: dict[str, Any], setting: str | None
) -> None:
    """Everything else is for another engine, which the row names."""
    job = asked(engine="optimum-habana", device="hpu", precision="bf16", **changes)
    found = list(engine_refusals(job, "train"))
    assert [each.setting for each in found] == ([setting] if setting else [])
    assert all(each.unsupported and "engine transformers" in each.hint for each in found)


def test_rules_and_registry_load_neither_torch_nor_transformers() -> None:
    """The plan asks them for every job, targets of a model included."""
    code = (
        "import sys\n"
        "from finetuning_cases import asked\n"
        "from workloads.finetuning import refuse\n"
        "assert refuse(asked(targets='nothing'))\n"
        "heavy = {'torch', 'transformers', 'peft', 'ray'} & set(sys.modules)\n"
        "sys.exit(','.join(heavy) or 0)"
    )
    here = Path(__file__).resolve()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=here.parent,
        env={"PYTHONPATH": str(here.parents[2]), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ targets


def test_targets_are_chosen_from_what_there_is() -> None:
    """By name, all of them, or the attention's inputs."""
    layers = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo"]
    assert rules.choose(None, layers) == ("q_proj", "k_proj", "v_proj")
    assert rules.choose("v_proj, q_proj", layers) == ("v_proj", "q_proj")
    assert rules.choose("all-linear", layers) == ("k_proj", "o_proj", "q_proj", "v_proj")
    with pytest.raises(BadConfiguration, match=r"none of the usual attention layers.* w1, w2"):
        rules.choose(None, ["a.0.w1", "a.0.w2"])
    with pytest.raises(BadConfiguration, match="there is: k_proj, o_proj, q_proj, v_proj"):
        rules.choose("query", layers)


def test_names_of_a_checkpoint_are_read_from_its_header(tmp_path: Path) -> None:
    """What the plan reads from the files is what the loaded model has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from workloads.models.describe import linear_layers

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    expected = {layer.name.rsplit(".", 1)[-1] for layer in linear_layers(model)}
    assert rules.linear_names(str(tmp_path)) == expected
    assert rules.linear_names("tiny-chatglm3") == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_up_proj", "down_proj"),
    }
    assert rules.linear_names(str(tmp_path / "nothing")) is None
