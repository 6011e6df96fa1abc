"""Rules of training jobs: contradictions, what one device lacks, and their document."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from finetuning_cases import asked, refuse, small_model
from outside_device import offer

from tools.documents.techniques import markdown
from workloads.base import BadConfiguration
from workloads.models import rules
from workloads.registry import Declared
from workloads.rules import engine_refusals
from workloads.training import techniques
from workloads.training.technique import Technique
from workloads.training.techniques import all_techniques

ROOT = Path(__file__).resolve().parents[3]
METHODS = ("full", "lora", "vera", "dora", "qlora", "qat", "qat-lora")
FP32: dict[str, Any] = {"precision": "fp32"}
FULL: dict[str, Any] = {"method": "full"}
QUARTER: dict[str, Any] = {"gradient_accumulation": 4}
PACKED: dict[str, Any] = {"padding": "packing", "packed_attention": "apart"}
PINNED: dict[str, Any] = {"pin_memory": True}
CHUNKED: dict[str, Any] = {"logits": "chunked"}
LIGER: dict[str, Any] = {"fused_kernels": "liger"}
TWO: dict[str, Any] = {"cards": 2}
FOUR: dict[str, Any] = {"cards": 4}
TENSOR: dict[str, Any] = TWO | {"strategy": "tensor-parallel"}
FSDP2: dict[str, Any] = TWO | {"strategy": "fsdp2"}
ZERO1: dict[str, Any] = TWO | {"strategy": "zero1"}
ZERO2: dict[str, Any] = TWO | {"strategy": "zero2"}
ZERO3: dict[str, Any] = TWO | {"strategy": "zero3"}
#: A pipeline over all of four cards, in four micro-batches.
PIPE: dict[str, Any] = FOUR | QUARTER | {"strategy": "pipeline"}
ONE_STAGE: dict[str, Any] = PIPE | {"pipeline_parallel": 1}
INTERLEAVED: dict[str, Any] = {"pipeline_schedule": "interleaved"}
LOOPED: dict[str, Any] = PIPE | INTERLEAVED
T5: dict[str, Any] = {"model": "tiny-t5", "dataset": "cnn-dailymail-synthetic", "max_length": 512}
STUDENT: dict[str, Any] = {"method": "distill", "student_layers": 2}
SPARSE: dict[str, Any] = {"sparsity": "2:4"}
ALMOST: dict[str, Any] = {"sparsity_share": 0.9999999}
ATOMS: dict[str, Any] = FULL | {"dictionary_atoms": 8}
ONE_OF_TWO: dict[str, Any] = {"pipeline_parallel": 2, "gradient_accumulation": 1}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_allowed_on_every_device(method: str) -> None:
    for device, precision in product(("cpu", "cuda", "hpu"), ("fp32", "bf16")):
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
        (QUARTER | {"batch_size": "max"}, "gradient_accumulation", "what fits in one pass"),
        (QUARTER | {"batch_size": 6}, "gradient_accumulation", "of 6 cannot hint: 1, 2, 3, 6"),
        ({"freeze_layers": 1}, "freeze_layers", "beside method: full or qat or distill"),
        ({"precision": "fp16"}, "precision", "plain fp16 ends in NaN"),
        (FULL | {"precision": "fp16", "autocast": "fp16"}, "precision", "fp16 weights"),
        ({"autocast": "fp16"}, "autocast", "lose range and precision"),
        ({"max_length": 8193}, "max_length", "8,193 tokens are more than the model's 8,192"),
        (PACKED | {"attention": "eager"}, "packed_attention", "another one"),
        ({"padding": "packing", "attention": "flash_attention_2"}, "padding", "in single rows"),
        ({"logits": "learned", "torch_compile": True}, "logits", "would be compiled"),
        (CHUNKED | {"autocast": "bf16"}, "logits", "outside of autocast"),
        (CHUNKED | {"method": "qat-lora"}, "logits", "which QAT converts whole"),
        (FP32 | {"attention": "flash_attention_2"}, "attention", "fp16 and bf16 only"),
        ({"matmul_precision": "high"}, "matmul_precision", "those of this job are in bf16"),
        (FP32 | {"matmul_precision": "high", "autocast": "bf16"}, "matmul_precision", "none is"),
        (FULL | {"save_every": 5, "save_mode": "incremental"}, "save_mode", "the whole model"),
        (LIGER | {"torch_compile": True}, "fused_kernels", "fuses the same passes"),
        ({"gradient_compression": "fp16"}, "gradient_compression", "exchanges no gradients"),
        (TENSOR | {"gradient_compression": "fp16"}, "gradient_compression", "exchange activations"),
        ({"strategy": "ddp"}, "strategy", "has one card"),
        ({"tensor_parallel": 2}, "tensor_parallel", "has one card"),
        (TENSOR | FOUR, "strategy", "6 attention heads cannot"),
        (FOUR | {"tensor_parallel": 3}, "tensor_parallel", "4 cards cannot be divided"),
        (TENSOR | FOUR | {"tensor_parallel": 2}, "tensor_parallel", "over all 4 cards"),
        (ZERO1 | {"tensor_parallel": 2}, "tensor_parallel", "there is one hint: below 2"),
        (PIPE | {"cards": 1}, "strategy", "has one card"),
        (PIPE | {"cards": 8, "batch_size": 8, "gradient_accumulation": 8}, "strategy", "4 layers"),
        (LOOPED, "strategy", "2 groups of layers each hint: 1, 2"),
        (PIPE | {"pipeline_parallel": 3}, "pipeline_parallel", "pipeline 3 is 3 cards hint: to be"),
        (PIPE | {"data_parallel": 3}, "data_parallel", "data 3 × tensor 1 hint: to be 4"),
        (PIPE | {"data_parallel": 4, "pipeline_parallel": 2}, "pipeline_parallel", "2 is 8 cards"),
        (FOUR | {"data_parallel": 2}, "data_parallel", "is 2 cards hint: data_parallel: 4"),
        (PIPE | {"cards": 16, "tensor_parallel": 4}, "tensor_parallel", "6 attention heads"),
        (PIPE | {"gradient_accumulation": 2}, "gradient_accumulation", "2 micro-batches hint: 16"),
        (LOOPED | ONE_OF_TWO, "gradient_accumulation", "a multiple of the 2 stages hint: : 8"),
        (PIPE | {"padding": "packing"}, "padding", "of one shape hint: fixed"),
        (ONE_STAGE | {"padding": "packing"}, "padding", "of one shape hint: fixed"),
        (ONE_STAGE | INTERLEAVED, "pipeline_schedule", "has one stage hint: leave pipeline_sch"),
        (TWO | {"pipeline_parallel": 2}, "pipeline_parallel", "ddp cuts no layers hint: pipeline"),
        ({"method": "distill"}, "method", "nothing says how they differ"),
        ({"method": "distill", "teacher": "tiny-chatglm3"}, "teacher", "is the student as well"),
        ({"method": "distill", "teacher": "tiny-t5"}, "teacher", "vocabulary"),
        (STUDENT | {"student_layers": 9}, "student_layers", "4 layers to copy"),
        (STUDENT | {"student_layers": 4}, "student_layers", "would be its teacher"),
        ({"method": "distill", "student_hidden": 33}, "student_hidden", "do not divide 33"),
        (STUDENT | {"teacher": "another"}, "student_layers", "as it is"),
        (STUDENT | FULL, "student_layers", "beside method: distill"),
        (STUDENT | {"teacher_logits": "kept", "padding": "packing"}, "teacher_logits", "sample a"),
        (STUDENT | CHUNKED, "logits", "compared by logits"),
        ({"sparsity": "magnitude"}, "sparsity", "beside method: full or distill"),
        ({"cluster_bits": 4, "method": "qat"}, "cluster_bits", "beside method: full or distill"),
        (FULL | {"sparsity_share": 0.5}, "sparsity_share", "beside sparsity"),
        (FULL | SPARSE | {"sparsity_share": 0.7}, "sparsity_share", "one half"),
        (FULL | SPARSE | {"sparsity_schedule": "gradual"}, "sparsity_schedule", "two of every"),
        (FULL | ALMOST | {"sparsity": "magnitude"}, "sparsity_share", "leaves none"),
        (FULL | ALMOST | {"sparsity": "channels"}, "sparsity_share", "leaves none"),
        (ATOMS | {"cluster_bits": 4}, "dictionary_atoms", "one code"),
        (ATOMS | {"dictionary_terms": 9}, "dictionary_terms", "9 of 8 atoms"),
        (ATOMS | {"dictionary_length": 7}, "dictionary_length", "no multiple of 7"),
        (FULL | {"dictionary_length": 8}, "dictionary_length", "beside dictionary_atoms"),
    ],
)
def test_a_contradiction_is_wrong_on_every_device(changes, setting, words) -> None:
    reason, _, hint = words.partition(" hint: ")
    for device in ("cuda", "cpu"):
        wrong = [r for r in refuse(asked(device=device, **changes)) if not r.unsupported]
        assert [refusal.setting for refusal in wrong] == [setting]
        assert reason in wrong[0].reason and hint in wrong[0].hint and wrong[0].hint


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"precision": "int8"}, "cpu", "weights in int8 have no gradients"),
        ({"precision": "int4"}, "cuda", "weights in int4 have no gradients"),
        ({"optimizer": "adamw-8bit"}, "hpu", "what Gaudi lacks: 8-bit optimizers"),
        ({"attention": "flash_attention_2"}, "cpu", "no cpu kernels"),
        ({"attention": "xformers"}, "hpu", "no hpu kernels"),
        (FSDP2 | CHUNKED, "cuda", "whole weights"),
        (FP32 | {"matmul_precision": "high"}, "hpu", "does not know"),
        (PINNED, "cpu", "page-locked"),
        (ZERO2 | {"torch_compile": True}, "cuda", "DeepSpeed drives"),
        (ZERO1 | {"save_every": 5, "save_mode": "async"}, "cuda", "no save_mode async under"),
        (ZERO1 | {"gradient_compression": "fp16"}, "cuda", "no gradient_compression fp16"),
        (TENSOR | {"method": "dora"}, "cpu", "no method dora over split matrices"),
        (TENSOR | {"save_adapter": "a"}, "cpu", "no save_adapter a over split matrices"),
        (ZERO3 | {"method": "qlora"}, "cpu", "no method qlora under DeepSpeed"),
        (ZERO3 | {"method": "qat"}, "cpu", "no qat under zero3"),
        (ZERO1 | {"autocast": "bf16"}, "cpu", "DeepSpeed switches torch's autocast off"),
        (ZERO2 | {"tensor_parallel": 2}, "cpu", "no zero2 of split matrices"),
        (ZERO1 | FOUR | {"tensor_parallel": 2, "save_every": 1}, "cpu", "no checkpoints of zero1"),
        (FSDP2 | {"method": "qlora"}, "cpu", "no method qlora under fsdp2"),
        (FSDP2 | {"save_every": 1}, "cpu", "no save_every 1 under fsdp2"),
        (FSDP2 | FOUR | {"tensor_parallel": 2}, "cpu", "no fsdp2 of split matrices"),
        (PIPE | {"profile": True}, "cpu", "no profile true over the stages"),
        (PIPE | FULL | {"save_model": "a"}, "cpu", "no save_model a over the stages"),
        (TENSOR | FULL | {"save_model": "a"}, "cpu", "no save_model a over split matrices"),
        (PIPE | FULL | SPARSE, "cpu", "whole weights, of which each card has a part"),
        (ZERO1 | FULL | SPARSE, "cpu", "DeepSpeed drives the model"),
        (T5 | {"precision": "fp16", "autocast": "fp16"}, "cpu", "overflow in fp16"),
        (T5 | FP32 | {"autocast": "fp16"}, "cpu", "overflow in fp16"),
        (T5 | {"padding": "packing"}, "cpu", "packs a source and its target into no row"),
        (T5 | {"logits": "learned"}, "cpu", "learns them all"),
        (TENSOR | STUDENT, "cpu", "no method distill over split matrices"),
        (PIPE | {"save_every": 1}, "cpu", "no save_every 1 over the stages"),
    ],
)
def test_what_cannot_run_becomes_a_row(changes: dict[str, Any], device: str, words: str) -> None:
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
        {"cards": 2, "fused_kernels": "liger", "method": "lora"},
        {"cards": 2, "torch_compile": True, "gradient_compression": "powersgd"},
        {"method": "full", "freeze_layers": 2, "save_every": 5, "save_mode": "incremental"},
        {"cards": 2, "save_every": 5, "save_mode": "async", "release_memory_every": 1},
        ZERO3 | {"save_every": 5},
        *({"cards": cards} for cards in (1, 4, 8)),  # so that cards can be an axis
        *(TENSOR | FULL | {"strategy": one, "max_gradient_norm": 1.0} for one in ("ddp", "zero1")),
        TENSOR | FULL | {"max_gradient_norm": 1.0},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_goes_together_is_let_through(changes: dict[str, Any]) -> None:
    assert not refuse(asked(device="cuda", **changes))


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
def test_optimum_habana_s_trainer_runs_lora_and_all_weights_on_any_cards(changes, setting) -> None:
    job = asked(engine="optimum-habana", device="hpu", precision="bf16", **changes)
    objections = list(engine_refusals(job, "train"))
    assert [one.setting for one in objections] == ([setting] if setting else [])
    assert all(one.unsupported and "engine transformers" in one.hint for one in objections)


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


def test_targets_are_chosen_from_what_there_is() -> None:
    layers = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo"]
    assert rules.choose(None, layers) == ("q_proj", "k_proj", "v_proj")
    assert rules.choose("v_proj, q_proj", layers) == ("v_proj", "q_proj")
    assert rules.choose("all-linear", layers) == ("k_proj", "o_proj", "q_proj", "v_proj")
    with pytest.raises(BadConfiguration, match=r"none of the usual attention layers.* w1, w2"):
        rules.choose(None, ["a.0.w1", "a.0.w2"])
    with pytest.raises(BadConfiguration, match="there is: k_proj, o_proj, q_proj, v_proj"):
        rules.choose("query", layers)


def test_names_of_a_checkpoint_are_read_from_its_header(tmp_path: Path) -> None:
    from workloads.models.describe import linear_layers

    model = small_model()
    model.save_pretrained(tmp_path)
    expected = {name.rsplit(".", 1)[-1] for name in linear_layers(model)}
    assert rules.linear_names(str(tmp_path)) == expected
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert rules.linear_names("tiny-chatglm3") == attention | {"gate_up_proj", "down_proj"}
    assert rules.linear_names(str(tmp_path / "nothing")) is None


def test_the_document_is_up_to_date_and_has_every_setting_and_limit() -> None:
    text = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
    how = "write it anew: python -m tools.documents.techniques > docs/techniques.md"
    assert text == markdown(), how
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
    offer(tmp_path, {"twice": "twice:Twice"}, "nightgrid.techniques")
    (tmp_path / "twice.py").write_text(SETTING.format(taken))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "twice", raising=False)
    fresh = Declared(techniques.TECHNIQUES.where, Technique, "nightgrid.techniques")
    monkeypatch.setattr(techniques, "TECHNIQUES", fresh)
    assert "twice" in fresh
    assert all_techniques.__wrapped__() == all_techniques()
    assert f"technique twice: {whose} has a setting {taken} already; rename one" in caplog.text
