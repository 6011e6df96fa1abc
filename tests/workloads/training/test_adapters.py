"""Adapters on disk, in use, and carried between ChatGLM3's layouts exactly."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_cases import train
from generation_cases import Worker
from peft import LoraConfig, get_peft_model
from transformers import PretrainedConfig

from workloads.base import BadConfiguration, DataMissing
from workloads.models.chatglm3.conversion import convert
from workloads.models.loading import load_causal_model, open_model
from workloads.training import saved_adapters
from workloads.training.saved_adapters import Adapter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import chatglm3_reference as reference

# An adapter is trained for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared")]

IDS = torch.tensor([[5, 9, 77, 12, 300, 41, 8, 9]])


@pytest.fixture(scope="module")
def small(shared: Path) -> str:
    train(learning_rate=0.1, save_adapter="small", samples=8)
    return "small"


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("method", ["lora", "dora", "vera", "qat-lora"])
def test_a_saved_adapter_gives_the_same_logits_again(method, monkeypatch) -> None:
    trained: list[torch.Tensor] = []
    save = saved_adapters.save_adapter

    def watching(model: Any, name: str, origin: Any) -> Path:
        if method != "qat-lora":  # there the base in training is rounded
            trained.append(_logits(model.eval()))
        return save(model, name, origin)

    monkeypatch.setattr(saved_adapters, "save_adapter", watching)
    job = {"method": method, "learning_rate": 0.1, "samples": 8, "steps": 2}
    result = train(**job, save_adapter=f"kept-{method}")
    directory = Path(result.details["saved_adapter"])
    names = {"adapter_config.json", "adapter_model.safetensors", "nightgrid.json"}
    assert {file.name for file in directory.iterdir()} >= names
    assert json.loads((directory / "nightgrid.json").read_text())["model"] == "tiny-chatglm3"
    base = load_causal_model(open_model("tiny-chatglm3"), dtype=torch.float32).eval()
    plain = _logits(base)
    detail = saved_adapters.attach(base, f"kept-{method}")
    assert detail.startswith(f"kept-{method}: ") and "q_proj" in detail
    again = _logits(base)
    assert (again - plain).abs().max() > 0.01
    for logits in trained:
        torch.testing.assert_close(again, logits, rtol=0, atol=0)


def test_inference_runs_with_the_adapter_of_a_training_job(small: str) -> None:
    plain, adapted, quantized = (
        Worker().run("advertisegen-synthetic", prompts=4, output_tokens=8, **changes)
        for changes in ({}, {"adapter": small}, {"adapter": small, "precision": "int4"})
    )
    assert "adapter" not in plain.details
    assert adapted.details["adapter"].startswith("small: LORA, rank 8")
    assert [i.output_text for i in adapted.items] != [i.output_text for i in plain.items]
    assert "NF4" in quantized.precision_detail


def test_a_missing_adapter_is_named_with_where_it_was_looked_for(small: str) -> None:
    with pytest.raises(DataMissing, match=rf"did you mean {small}.*NIGHTGRID_ADAPTERS"):
        saved_adapters.find_adapter("smal")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, small: str) -> None:
    directory = saved_adapters.find_adapter(small)
    model, _, _ = _converted(tmp_path)
    with pytest.raises(BadConfiguration, match=r"small' does not fit this model.*size mismatch"):
        saved_adapters.attach(model, str(directory))


def test_an_adapter_without_a_rank_is_attached(tmp_path: Path) -> None:
    from peft import IA3Config

    model, _, _ = _converted(tmp_path)
    plain = _logits(model)
    trained = get_peft_model(model, IA3Config(target_modules=["o_proj"], feedforward_modules=[]))
    for name, tensor in trained.named_parameters():
        if "ia3" in name:
            tensor.data.fill_(2.0)
    trained.save_pretrained(tmp_path / "adapter")
    expected = _logits(trained)
    model = trained.unload()
    torch.testing.assert_close(_logits(model), plain)
    described = saved_adapters.attach(model, str(tmp_path / "adapter"))
    assert described.endswith("adapter: IA3, on o_proj")
    torch.testing.assert_close(_logits(model), expected)


def _converted(directory: Path) -> tuple[Any, dict[str, torch.Tensor], tuple[int, int, int]]:
    from transformers import AutoModelForCausalLM

    state = reference.random_state()
    source = reference.write_checkpoint(directory / "original", state)
    convert(source, directory / "native")
    model = AutoModelForCausalLM.from_pretrained(directory / "native", torch_dtype=torch.float32)
    return model.eval(), state, saved_adapters.rows_of(model.config)


def _fused_lora(targets: tuple[str, ...] = ("query_key_value",), rank: int = 4) -> Adapter:
    generator = torch.Generator().manual_seed(1)
    config = reference.CONFIG
    shapes = {
        "query_key_value": ("self_attention", 64 + 2 * 32, 64),
        "dense": ("self_attention", 64, 64),
        "dense_h_to_4h": ("mlp", 2 * 96, 64),
        "dense_4h_to_h": ("mlp", 64, 96),
    }
    state = {}
    for layer, target in product(range(int(config["num_layers"])), targets):
        block, outputs, inputs = shapes[target]
        at = f"base_model.model.transformer.encoder.layers.{layer}.{block}.{target}"
        for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            state[f"{at}.{part}.weight"] = torch.randn(*shape, generator=generator) * 0.2
    return LoraConfig(r=rank, lora_alpha=6, target_modules=list(targets)), state


def _merged(state: dict[str, torch.Tensor], lora: Adapter) -> dict[str, torch.Tensor]:
    merged, (config, tensors) = dict(state), lora
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        up = tensors[name.replace("lora_A", "lora_B")]
        target = name.split(".")[-3]
        rank = config.rank_pattern.get(target, config.r)
        scale = config.alpha_pattern.get(target, config.lora_alpha) / rank
        assert down.shape[0] == rank
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        merged[weight] = merged[weight] + scale * up @ down
    return merged


def _write(directory: Path, lora: Adapter) -> Path:
    from safetensors.torch import save_file

    config, state = lora
    directory.mkdir()
    config.save_pretrained(directory)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def test_lora_on_the_original_layout_works_on_the_converted_model(tmp_path: Path) -> None:
    model, state, _ = _converted(tmp_path)
    fused = _fused_lora(("dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"))
    plain = reference.logits(state, IDS)
    expected = reference.logits(_merged(state, fused), IDS)
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(_logits(model), plain, rtol=0, atol=1e-4)
    saved_adapters.attach(model, str(_write(tmp_path / "adapter", fused)))
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-4)


def test_from_fused_to_split_and_back_is_the_same_adapter() -> None:
    rows = (64, 32, 32)
    fused = _fused_lora(("dense", "query_key_value"))
    split = saved_adapters.to_native(*fused, rows)
    assert split[0].target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
    config, state = saved_adapters.to_original(*split, rows)
    assert (config.r, config.lora_alpha, config.rank_pattern) == (4, 6, {})
    assert config.target_modules == {"dense", "query_key_value"}
    assert state.keys() == fused[1].keys()
    assert all(tensor.equal(state[name]) for name, tensor in fused[1].items())


def test_lora_trained_on_the_converted_model_goes_back(tmp_path: Path) -> None:
    model, state, rows = _converted(tmp_path)
    config, split = saved_adapters.to_native(*_fused_lora(("dense", "query_key_value")), rows)
    generator = torch.Generator().manual_seed(2)
    unlike = {
        name: tensor + torch.randn(tensor.shape, generator=generator) * 0.1
        for name, tensor in split.items()
    }
    back = saved_adapters.to_original(config, unlike, rows)
    assert back[0].rank_pattern == {"query_key_value": 12} and back[0].r == 4
    expected = reference.logits(_merged(state, back), IDS)
    saved_adapters.attach(model, str(_write(tmp_path / "adapter", (config, unlike))))
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-4)


def test_what_is_not_plain_lora_is_refused() -> None:
    """DoRA and rank-stabilised LoRA are no sums of rows; a lone query adapter has no fused one."""
    rows = (64, 32, 32)
    for flag in ("use_dora", "use_rslora"):
        with pytest.raises(BadConfiguration, match="only plain LoRA"):
            saved_adapters.to_native(LoraConfig(**{flag: True}), {}, rows)
    config, split = saved_adapters.to_native(*_fused_lora(), rows)
    lone = {name: tensor for name, tensor in split.items() if "q_proj" in name}
    with pytest.raises(BadConfiguration, match="all of q_proj, k_proj, v_proj"):
        saved_adapters.to_original(config, lone, rows)
    with pytest.raises(BadConfiguration, match="this model's query, key and value 136 together"):
        saved_adapters.to_native(*_fused_lora(), (72, 32, 32))


def test_an_adapter_in_the_older_format_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="has no adapter_model"):
        saved_adapters.read_state(tmp_path)
    torch.save({"a": torch.ones(2)}, tmp_path / "adapter_model.bin")
    assert saved_adapters.read_state(tmp_path)["a"].tolist() == [1.0, 1.0]


class _Original(torch.nn.Module):
    """The linear layers of one layer of ChatGLM3 in its original layout."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig(kv_channels=16, multi_query_group_num=2)
        self.config.num_attention_heads, self.config.model_type = 4, "chatglm"
        layer = torch.nn.Module()
        layer.self_attention = torch.nn.Module()
        layer.self_attention.query_key_value = torch.nn.Linear(64, 64 + 2 * 32)
        layer.self_attention.dense = torch.nn.Linear(64, 64, bias=False)
        self.transformer = torch.nn.Module()
        self.transformer.encoder = torch.nn.Module()
        self.transformer.encoder.layers = torch.nn.ModuleList([layer])

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.transformer.encoder.layers[0].self_attention.query_key_value(hidden)


def test_a_fused_layer_gets_the_adapters_of_three_and_keeps_its_product(tmp_path: Path) -> None:
    """By hand: each slice of the product has its own A and B, as in the native layout; the saved
    adapter has the native layout's names."""
    torch.manual_seed(0)
    model, given = _Original(), torch.randn(2, 5, 64)
    with torch.no_grad():
        plain = model(given)
        saved_adapters.split_fused(model, None)
        torch.testing.assert_close(model(given), plain)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj", "dense"])
    wrapped = get_peft_model(model, config)
    trained = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
    assert sum(map(torch.Tensor.numel, trained.values())) == 4 * (3 * 64 + 128 + 64 + 64)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_()
        saved_adapters.save_adapter(wrapped, "split", {})
        saved = saved_adapters.read_state(saved_adapters.find_adapter("split"))
        root = "base_model.model.model.layers.0.self_attn"
        assert {name.rsplit(".", 2)[0] for name in saved} == {
            f"{root}.{name}_proj" for name in ("q", "k", "v", "o")
        }
        added = torch.cat(
            [
                given
                @ saved[f"{root}.{name}_proj.lora_A.weight"].t()
                @ saved[f"{root}.{name}_proj.lora_B.weight"].t()
                for name in ("q", "k", "v")
            ],
            dim=-1,
        )
        torch.testing.assert_close(wrapped(given), plain + 6 / 4 * added)


def test_a_named_fused_layer_stays_whole() -> None:
    model = _Original()
    saved_adapters.split_fused(model, "query_key_value")
    layer = model.transformer.encoder.layers[0].self_attention.query_key_value
    assert isinstance(layer, torch.nn.Linear)
