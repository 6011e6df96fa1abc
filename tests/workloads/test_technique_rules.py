"""Refusals of techniques in the plan, with the reason, and their document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from finetuning_cases import asked, refuse
from pydantic import ValidationError

from tools.documents.techniques import markdown
from workloads.registry import Declared, find_workload
from workloads.training import techniques
from workloads.training.technique import Technique
from workloads.training.techniques import all_techniques

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "techniques.md"
FP32 = {"precision": "fp32"}
TOGETHER = {"method": "lora", "adapter_products": "together"}


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        (FP32 | {"attention": "flash_attention_2"}, "attention", "fp16 and bf16 only"),
        ({"matmul_precision": "high"}, "matmul_precision", "those of this job are in bf16"),
        (
            FP32 | {"matmul_precision": "high", "autocast": "bf16"},
            "matmul_precision",
            "none is left in fp32",
        ),
        ({"matmul_backend": "onednn"}, "matmul_backend", "of which this job has none"),
        (
            FP32 | {"matmul_backend": "onednn", "matmul_precision": "high"},
            "matmul_backend",
            "one switch for both",
        ),
        ({"prefetch_batches": 4}, "prefetch_batches", "beside data_workers"),
        ({"non_blocking_copies": True}, "non_blocking_copies", "beside pin_memory: true"),
        (
            {"padding": "packing", "length_window": 4},
            "length_window",
            "beside padding: uniform-length",
        ),
        ({"save_mode": "async"}, "save_mode", "beside save_every"),
        (
            {"method": "full", "save_every": 5, "save_mode": "incremental"},
            "save_mode",
            "an increment is the whole model",
        ),
        (
            {"fused_kernels": "liger", "torch_compile": True},
            "fused_kernels",
            "fuses the same passes",
        ),
        ({"gradient_compression": "fp16"}, "gradient_compression", "exchanges no gradients"),
        ({"powersgd_rank": 2}, "powersgd_rank", "beside gradient_compression: powersgd"),
        (
            {"cards": 2, "gradient_compression": "bf16", "powersgd_rank": 2},
            "powersgd_rank",
            "beside gradient_compression: powersgd",
        ),
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
    for device in ("cuda", "cpu", "hpu"):
        wrong = [r for r in refuse(asked(device=device, **changes)) if not r.unsupported]
        assert [refusal.setting for refusal in wrong] == [setting]
        assert words in wrong[0].reason and wrong[0].hint


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"attention": "flash_attention_2"}, "cpu", "no cpu kernels"),
        ({"attention": "xformers"}, "hpu", "no hpu kernels"),
        ({"fused_kernels": "liger"}, "cpu", "package liger-kernel"),
        ({"fused_kernels": "liger"}, "hpu", "package liger-kernel"),
        (
            {"cards": 2, "strategy": "tensor-parallel", "fused_kernels": "liger"},
            "cuda",
            "whole weights",
        ),
        ({"cards": 2, "strategy": "zero1", "fused_kernels": "liger"}, "cuda", "DeepSpeed drives"),
        ({"cards": 2, "strategy": "zero3", "fused_kernels": "liger"}, "cuda", "whole weights"),
        ({"cards": 2, "strategy": "fsdp2", "fused_kernels": "liger"}, "cuda", "whole weights"),
        ({"cards": 2, "strategy": "zero0", "logits": "chunked"}, "cuda", "DeepSpeed drives"),
        ({"cards": 2, "strategy": "zero3", "logits": "chunked"}, "cuda", "whole weights"),
        (TOGETHER | {"cards": 2, "strategy": "zero1"}, "cuda", "DeepSpeed drives"),
        (TOGETHER | {"cards": 2, "strategy": "zero3"}, "cuda", "whole weights"),
        (TOGETHER | {"cards": 2, "strategy": "fsdp2"}, "cuda", "whole weights"),
        (FP32 | {"matmul_precision": "high"}, "hpu", "does not know"),
        (FP32 | {"matmul_backend": "onednn"}, "cuda", "lacks: fp32 products by oneDNN"),
        ({"pin_memory": True}, "cpu", "page-locked"),
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
    "changes",
    [
        {"attention": "flash_attention_3"},
        {"data_workers": -1},
        {"prefetch_batches": 0},
        {"save_every": -5},
        {"powersgd_rank": 0},
        {"torch_compile": 1},
        {"tokenizer": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_values_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    """By the parameters model, before any rule."""
    with pytest.raises(ValidationError):
        find_workload("finetuning").validate(changes)


def test_the_document_is_up_to_date() -> None:
    """docs/techniques.md is what the techniques say of themselves."""
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(), (
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
    fresh = Declared(techniques.TECHNIQUES._where, Technique, "nightgrid.techniques")
    monkeypatch.setattr(techniques, "TECHNIQUES", fresh)
    assert "twice" in fresh
    assert all_techniques.__wrapped__() == all_techniques()
    assert f"technique twice: {whose} has a setting {taken} already; rename one" in caplog.text
