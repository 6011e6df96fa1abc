"""Rules of training jobs: contradictions, what one device lacks, and their document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from finetuning_cases import asked, refuse
from pydantic import ValidationError

from tools.documents.techniques import markdown
from workloads.base import BadConfiguration
from workloads.models import rules
from workloads.registry import Declared, find_workload
from workloads.rules import engine_refusals
from workloads.training import techniques
from workloads.training.methods import ADAPTER_METHODS
from workloads.training.technique import Technique
from workloads.training.techniques import all_techniques

ROOT = Path(__file__).resolve().parents[3]
METHODS = ("full", "lora", "vera", "dora", "qlora", "qat", "qat-lora")
FP32 = {"precision": "fp32"}
FULL = {"method": "full"}
PACKED = {"padding": "packing", "packed_attention": "apart"}
TOGETHER = {"method": "lora", "adapter_products": "together"}
PINNED = {"pin_memory": True}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_allowed_on_every_device(method: str, device: str, precision: str) -> None:
    """In fp32 and bf16 all of them."""
    assert not refuse(asked(method=method, device=device, precision=precision))


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        (FULL | {"rank": 4}, "rank", "method full has no adapter"),
        ({"method": "qat", "save_adapter": "a"}, "save_adapter", "method qat has no adapter"),
        ({"method": "vera", "alpha": 4}, "alpha", "has no alpha"),
        ({"targets": "q_proj,kproj"}, "targets", "no linear layer is named kproj"),
        ({"targets": ","}, "targets", "no linear layer"),
        ({"gradient_accumulation": 3}, "gradient_accumulation", "cannot be cut into 3"),
        (
            {"batch_size": "max", "gradient_accumulation": 2},
            "gradient_accumulation",
            "what fits in one pass",
        ),
        ({"freeze_layers": 1}, "freeze_layers", "beside method: full or qat or distill"),
        ({"precision": "fp16"}, "precision", "plain fp16 ends in NaN"),
        (FULL | {"precision": "fp16", "autocast": "fp16"}, "precision", "fp16 weights"),
        ({"autocast": "fp16"}, "autocast", "lose range and precision"),
        ({"max_length": 8193}, "max_length", "8,193 tokens are more than the model's 8,192"),
        ({"packed_attention": "apart"}, "packed_attention", "beside padding: packing"),
        (PACKED | {"attention": "eager"}, "packed_attention", "another one"),
        ({"logits": "learned", "torch_compile": True}, "logits", "would be compiled"),
        ({"compile_scope": "layers"}, "compile_scope", "beside torch_compile: true"),
        ({"packed_length": "longest"}, "packed_length", "beside packed_attention: apart"),
        ({"logits": "chunked", "autocast": "bf16"}, "logits", "outside of autocast"),
        ({"logits": "chunked", "method": "qat-lora"}, "logits", "which QAT converts whole"),
        (FP32 | {"attention": "flash_attention_2"}, "attention", "fp16 and bf16 only"),
        ({"matmul_precision": "high"}, "matmul_precision", "those of this job are in bf16"),
        (
            FP32 | {"matmul_precision": "high", "autocast": "bf16"},
            "matmul_precision",
            "none is left in fp32",
        ),
        ({"prefetch_batches": 4}, "prefetch_batches", "beside data_workers"),
        (
            PINNED | {"copy_ahead": True, "non_blocking_copies": True},
            "non_blocking_copies",
            "by the card alone",
        ),
        ({"copy_ahead": True}, "copy_ahead", "beside pin_memory: true"),
        (
            FULL | {"save_every": 5, "save_mode": "incremental"},
            "save_mode",
            "an increment is the whole model",
        ),
        (
            {"fused_kernels": "liger", "torch_compile": True},
            "fused_kernels",
            "fuses the same passes",
        ),
        ({"gradient_compression": "fp16"}, "gradient_compression", "exchanges no gradients"),
        (
            {"cards": 2, "strategy": "tensor-parallel", "gradient_compression": "fp16"},
            "gradient_compression",
            "exchange activations",
        ),
    ],
)
def test_a_contradiction_is_wrong_on_every_device(
    changes: dict[str, Any], setting: str, words: str
) -> None:
    """It is refused with the setting, the reason and what would be right."""
    for device in ("cuda", "cpu"):
        wrong = [r for r in refuse(asked(device=device, **changes)) if not r.unsupported]
        assert [refusal.setting for refusal in wrong] == [setting]
        assert words in wrong[0].reason and wrong[0].hint


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"precision": "int8"}, "cpu", "weights in int8 have no gradients"),
        ({"precision": "int4"}, "cuda", "weights in int4 have no gradients"),
        ({"optimizer": "adamw-8bit"}, "hpu", "what Gaudi lacks: 8-bit optimizers"),
        ({"optimizer": "adamw-8bit-paged"}, "cpu", "lacks: bitsandbytes moves"),
        (FP32 | {"autocast": "fp16"}, "hpu", "what Gaudi lacks: torch's gradient scaler"),
        ({"attention": "flash_attention_2"}, "cpu", "no cpu kernels"),
        ({"attention": "xformers"}, "hpu", "no hpu kernels"),
        ({"fused_kernels": "liger"}, "cpu", "package liger-kernel"),
        ({"cards": 2, "strategy": "zero1", "fused_kernels": "liger"}, "cuda", "DeepSpeed drives"),
        ({"cards": 2, "strategy": "zero3", "fused_kernels": "liger"}, "cuda", "whole weights"),
        ({"cards": 2, "strategy": "zero0", "logits": "chunked"}, "cuda", "DeepSpeed drives"),
        (TOGETHER | {"cards": 2, "strategy": "fsdp2"}, "cuda", "whole weights"),
        (FP32 | {"matmul_precision": "high"}, "hpu", "does not know"),
        (FP32 | {"matmul_backend": "onednn"}, "cuda", "lacks: fp32 products by oneDNN"),
        (PINNED, "cpu", "page-locked"),
        (PINNED | {"copy_ahead": True}, "hpu", "copied beside the work"),
        ({"cards": 2, "strategy": "zero2", "torch_compile": True}, "cuda", "DeepSpeed drives"),
        (
            {"cards": 2, "strategy": "tensor-parallel", "torch_compile": True},
            "cuda",
            "split over cards",
        ),
        (
            {"cards": 2, "strategy": "zero1", "save_every": 5, "save_mode": "async"},
            "cuda",
            "DeepSpeed writes its parts",
        ),
        (
            {"cards": 2, "strategy": "zero1", "gradient_compression": "fp16"},
            "cuda",
            "DeepSpeed's own way",
        ),
    ],
)
def test_what_cannot_run_becomes_a_row(changes: dict[str, Any], device: str, words: str) -> None:
    """It makes sense and cannot be had: UNSUPPORTED, with the reason."""
    (refusal,) = refuse(asked(device=device, **changes))
    assert refusal.unsupported and words in refusal.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "flash_attention_2"},
        FP32 | {"attention": "flash_attention_2", "autocast": "bf16"},
        {"attention": "xformers", "padding": "packing"},
        FP32 | {"matmul_precision": "high"},
        {"pin_memory": True, "non_blocking_copies": True, "data_workers": 2, "prefetch_batches": 4},
        {"torch_compile": True, "gradient_checkpointing": True},
        {"fused_kernels": "liger", "logits": "chunked", "gradient_checkpointing": True},
        {"cards": 2, "fused_kernels": "liger", "adapter_products": "together", "method": "lora"},
        {"cards": 2, "torch_compile": True, "gradient_compression": "powersgd"},
        {"method": "full", "freeze_layers": 2, "save_every": 5, "save_mode": "incremental"},
        {"cards": 2, "save_every": 5, "save_mode": "async", "release_memory_every": 1},
        {"cards": 2, "save_every": 5, "strategy": "zero3"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_goes_together_is_let_through(changes: dict[str, Any]) -> None:
    """On an NVIDIA card nothing speaks against these."""
    assert not refuse(asked(device="cuda", **changes))


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
        {"torch_compile": 1},
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
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests" / "workloads",
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
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


def test_the_document_is_up_to_date() -> None:
    """docs/techniques.md is what the techniques say of themselves."""
    assert (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8") == markdown(), (
        "write it anew: python -m tools.documents.techniques > docs/techniques.md"
    )


def test_the_document_has_every_setting_and_limit() -> None:
    """Each technique's settings are in it, and what a device cannot do."""
    text = markdown()
    for kind in all_techniques():
        assert all(f"| `{name}` |" in text for name in kind.model_fields)
    assert "`pin_memory: true` on cpu" in text
    assert "`attention: xformers` on cpu" in text
    assert "`optimizer: adamw-8bit` on hpu" in text


SETTING = """\
from workloads.settings import setting
from workloads.training.technique import Technique
class Twice(Technique):
    name = "twice"
    title = "twice"
    {}: int = setting(1, role="choice", description="One more.")
"""


@pytest.mark.parametrize(
    ("taken", "whose"),
    [("padding", "padding"), ("rank", "the method of fine-tuning"), ("batch_size", "a job")],
)
def test_a_setting_of_ours_is_not_taken_by_another_package(
    taken: str,
    whose: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A technique whose setting is called as one of ours, as one of the method or as a field of a
    job is left out and told; ours are there."""
    (tmp_path / "twice-1.dist-info").mkdir()
    (tmp_path / "twice-1.dist-info" / "METADATA").write_text("Name: twice\nVersion: 1\n")
    points = "[nightgrid.techniques]\ntwice = twice:Twice\n"
    (tmp_path / "twice-1.dist-info" / "entry_points.txt").write_text(points)
    (tmp_path / "twice.py").write_text(SETTING.format(taken))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "twice", raising=False)
    fresh = Declared(techniques.TECHNIQUES.where, Technique, "nightgrid.techniques")
    monkeypatch.setattr(techniques, "TECHNIQUES", fresh)
    assert "twice" in fresh
    assert all_techniques.__wrapped__() == all_techniques()
    assert f"technique twice: {whose} has a setting {taken} already; rename one" in caplog.text
