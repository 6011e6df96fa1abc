"""Models of a known shape with random weights: right sizes, no file of weights, every precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from generation_cases import described
from transformers import AutoModelForCausalLM

from workloads.base import DataMissing, JobDescription
from workloads.models import random_weights
from workloads.models.catalog import checkpoint_kind, find_model
from workloads.models.describe import build_on_meta
from workloads.models.loading import load_causal_model, load_config, load_tokenizer, open_model
from workloads.models.rules import text_refusals
from workloads.rules import engine_refusals

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}


def config_of(architecture: str) -> dict[str, object]:
    path = random_weights.DIRECTORY / architecture / "config.json"
    return dict(json.loads(path.read_text()))


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    directory = tmp_path / "shape"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_of("llama-3.1-8b") | SMALL))
    return directory


@pytest.mark.parametrize(
    ("architecture", "parameters"),
    [
        ("chatglm3-6b", 6_243_584_000),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_an_architecture_has_as_many_parameters_as_its_maker_says(architecture, parameters) -> None:
    assert find_model(f"random:{architecture}").random_weights
    model = build_on_meta(config_of(architecture))
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_weights_are_made_where_they_are_used_and_lie_nowhere(shape: Path) -> None:
    source = open_model(f"random:{shape}")
    assert source.random_weights
    assert not list(Path(source.path).glob("*.safetensors")) and Path(source.path) != shape
    model = load_causal_model(source, dtype=torch.bfloat16, attn_implementation="sdpa")
    assert model.dtype is torch.bfloat16 and float(model.lm_head.weight.float().std()) > 0.01
    tokenizer = load_tokenizer(source)
    ids = tokenizer("naïve 雨")["input_ids"]
    assert len(ids) == len("naïve 雨".encode()) and tokenizer.decode(ids) == "naïve 雨"


def test_a_quantised_model_is_the_plain_one_quantised(shape: Path) -> None:
    from transformers import BitsAndBytesConfig

    source = open_model(f"random:{shape}")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    quantised = load_causal_model(
        source, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": "cpu"}
    )
    plain = random_weights.make(AutoModelForCausalLM, load_config(source), dtype=torch.bfloat16)
    name = "model.layers.0.mlp.down_proj"
    found = quantised.get_submodule(name)
    assert type(found).__name__ == "Linear4bit"
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(found.weight.data, found.weight.quant_state).float()
    wanted = plain.get_submodule(name).weight.float()
    assert torch.corrcoef(torch.stack([weight.flatten(), wanted.flatten()]))[0, 1] > 0.98


def test_a_tokenizer_beside_the_configuration_is_taken(shape: Path) -> None:
    before = random_weights.cache_key(shape)
    bytes_only = open_model(f"random:{shape}")
    (shape / "tokenizer.json").write_bytes(
        (Path(bytes_only.path) / "tokenizer.json").read_bytes() + b" "
    )
    assert random_weights.cache_key(shape) != before
    taken = Path(open_model(f"random:{shape}").path) / "tokenizer.json"
    assert taken.read_bytes() == (shape / "tokenizer.json").read_bytes()


def test_what_is_no_architecture_is_refused() -> None:
    with pytest.raises(DataMissing, match=r"no architecture 'chatglm9'.*chatglm3-6b, llama-3.1-8b"):
        find_model("random:chatglm9")
    assert checkpoint_kind("random:chatglm9") is None


def asked(model: str, engine: str = "transformers", **parameters: object) -> JobDescription:
    usual = {"precision": "bf16", "dataset": "english-prompts", "input_tokens": None}
    return described(**usual | {"model": model, "engine": engine, "output_tokens": 32} | parameters)


@pytest.mark.parametrize(
    ("engine", "device", "ability", "refused"),
    [
        ("vllm", "cpu", "generate", True),
        ("vllm", "cpu", "serve", False),
        ("sglang", "cuda", "serve", False),
        ("endpoint", "cpu", "serve", True),
        ("transformers", "cpu", "serve", True),
        ("transformers", "cpu", "generate", False),
        ("graph", "cpu", "serve", False),
    ],
)
def test_an_engine_that_reads_files_is_unsupported(engine, device, ability, refused) -> None:
    job = asked("random:chatglm3-6b", engine, input_tokens=64, device=device)
    found = [one for one in engine_refusals(job, ability) if one.setting == "model"]
    assert [one.unsupported for one in found] == [True] * refused
    assert all(f"the engine {engine} reads weights" in one.reason for one in found)


BART = {"model_type": "bart", "is_encoder_decoder": True, "max_position_embeddings": 64}
T5 = {"model_type": "t5", "is_encoder_decoder": True, "n_positions": 64}


@pytest.mark.parametrize(
    ("config", "read", "written", "setting"),
    [
        ({"model_type": "gpt2", "n_positions": 64}, 40, 32, "input_tokens"),
        ({"model_type": "gpt2", "n_positions": 64}, 32, 32, None),
        (BART, 40, 65, "output_tokens"),
        (BART, 64, 64, None),
        (T5, 900, 900, None),
    ],
)
def test_each_family_has_its_own_name_for_its_positions(config, read, written, setting, tmp_path):
    """GPT-2's count input and output together, BART's each; T5's are relative, without end."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = asked(f"random:{tmp_path}", input_tokens=read, output_tokens=written)
    assert [refusal.setting for refusal in text_refusals(job)] == [setting] * bool(setting)


def test_the_plan_knows_that_there_is_no_tokenizer_and_no_room(shape: Path) -> None:
    [refusal] = text_refusals(asked(f"random:{shape}"))
    assert "no tokenizer" in refusal.reason and "input_tokens, 512" in refusal.hint
    assert not list(text_refusals(asked(f"random:{shape}", input_tokens=224)))
    [refusal] = text_refusals(asked(f"random:{shape}", input_tokens=225))
    assert refusal.setting == "input_tokens" and "257 tokens" in refusal.reason
    [refusal] = text_refusals(asked("tiny-chatglm3", input_tokens=9000))  # that of no files yet
    assert "8,192 positions" in refusal.reason
    [refusal] = text_refusals(asked("smollm2-135m-instruct", input_tokens=9000))  # a GGUF file
    assert "8,192 positions" in refusal.reason
    [refusal] = text_refusals(asked(str(shape)))
    assert refusal.reason.endswith("has no tokenizer") and "tokenizer.json" in refusal.hint
    config = config_of("chatglm3-6b") | {"max_position_embeddings": 256}
    (shape / "config.json").write_text(json.dumps(config))
    [refusal] = text_refusals(asked(str(shape)))
    assert "ChatGLM3's tokenizer.model" in refusal.hint
