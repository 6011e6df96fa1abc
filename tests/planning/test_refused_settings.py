"""Settings that a grid may not have, at the value to blame, and those that become a row."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from orchestrator.core.errors import GridError
from orchestrator.core.plan import Action
from orchestrator.core.topology import parse_emulation
from orchestrator.grid.parser import Grid, parse_grid
from orchestrator.planning.planner import make_plan

HEAD = "name: g\ndefaults: {model: tiny-chatglm3, accelerator: %s}\nexperiments:\n"
GENERATE = "workload: text-generation"
ONNX = f"{GENERATE}, engine: onnxruntime, precision: fp32"
ONNX8 = f"{GENERATE}, engine: onnxruntime, precision: int8"
QUANTIZE = "workload: quantization, precision: bf16"
TRAIN = "workload: finetuning, precision: fp32"


def one(body: str, accelerator: str = "CPU") -> Grid:
    """A grid of one experiment."""
    text = HEAD % accelerator + f"  - {{name: e, {body}}}\n"
    return parse_grid(text.encode(), "g.yaml")


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models that earlier jobs saved: one in int4, one of another vocabulary, one of odd sizes."""
    root = tmp_path_factory.mktemp("models")
    shape = {
        "model_type": "glm",
        "architectures": ["GlmForCausalLM"],
        "vocab_size": 4672,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    for name, change in {
        "packed": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "other-words": {"vocab_size": 4000},
        "odd": {"hidden_size": 198, "intermediate_size": 390},
    }.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**shape, **change}))
        layer = torch.zeros(4, 198 if name == "odd" else 192)
        tensors = {"model.layers.0.mlp.up_proj.weight": layer}
        save_file(tensors, root / name / "model.safetensors")
        (root / name / "tokenizer.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIGHTGRID_MODELS", str(root))
        yield


@pytest.mark.parametrize(
    ("body", "setting", "message"),
    [
        (f"{ONNX}, constant_folding: false, fusions: true", "fusions", "folded graphs only"),
        (f"{ONNX8}, constant_folding: false", "constant_folding", "int8 stores"),
        (f"{ONNX}, calibration: x", "calibration", "no job of this grid saves calibration 'x'"),
        (f"{QUANTIZE}, method: static, length: 9999999", "", "or a smaller length"),
        (f"{GENERATE}, model: packed, precision: bf16", "precision", "runs in int4"),
        (f"{GENERATE}, quality_of: tiny-chatglm3", "quality_of", "nothing is compared"),
        (f"{GENERATE}, quality: true, quality_of: other-words", "quality_of", "of 4,000 tokens"),
        (f"{TRAIN}, method: full, sparsity: magnitude, sparsity_share: 1.5", "share", "than"),
        (f'{TRAIN}, method: full, model: odd, sparsity: "2:4"', "sparsity", "no multiple of 4"),
        (
            f"{TRAIN}, batch_size: 6, axes: {{gradient_accumulation: [1, 2, 4]}}",
            "axes.gradient_accumulation[2]",
            "a batch of 6 cannot be cut into 4 equal parts",
        ),
        (f"{TRAIN}, save_adapter: ../x", "save_adapter", "should match pattern"),
    ],
)
def test_a_wrong_grid_is_refused_where_it_stands(body: str, setting: str, message: str) -> None:
    with pytest.raises(GridError) as caught:
        one(body)
    assert any(
        setting in problem.path and message in f"{problem.message} {problem.hint}"
        for problem in caught.value.problems
    ), [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("accelerator", "body", "reason"),
    [
        ("HPU", ONNX, "onnxruntime"),
        ("CPU", f"{ONNX}, tensor_parallel: 2, cards: 2", "every card the whole model"),
        ("CPU", f"{GENERATE}, calibration: x", "has no calibration; onnxruntime has"),
        ("CPU", f"{ONNX}, attention: eager", "none for eager"),
        ("CPU", f"{QUANTIZE}, method: awq, numbers: int4", "not maintained any more"),
        ("GPU", f"{TRAIN}, optimizer: adamw-8bit-paged", "bitsandbytes moves"),
    ],
)
def test_what_runs_elsewhere_is_a_row(accelerator: str, body: str, reason: str) -> None:
    shown = one(body, accelerator)
    planned = make_plan(shown, parse_emulation(f"1x2:{accelerator}", shown.accelerators()), []).jobs
    assert {item.action for item in planned} == {Action.UNSUPPORTED}
    assert reason in planned[-1].reason
