"""The table of shapes against transformers' own models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generation_cases import SIZES
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from workloads.inspection.families import FAMILIES, needed

MASKED = ("bert", "roberta", "camembert", "xlm-roberta", "distilbert")
PAIRS = ("t5", "mt5", "bart", "mbart")
#: Variants of a family: other values of its keys.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FAMILIES),
    *((name, {"tie_word_embeddings": True}) for name in ("llama", "qwen2", "gpt_neox")),
    *((name, {"tie_word_embeddings": False}) for name in ("gpt2", "t5", "bert", "gemma")),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("glm", {"attention_bias": True}),
    ("gpt_neox", {"attention_bias": False}),
    ("gpt2", {"n_inner": 52}),
    ("opt", {"word_embed_proj_dim": 20, "do_layer_norm_before": False}),
    ("opt", {"enable_bias": False}),
    ("t5", {"feed_forward_proj": "gated-gelu"}),
]


def model_of(config: Any) -> Any:
    """A model without values."""
    pairs, masked = config.model_type in PAIRS, config.model_type in MASKED
    loader = AutoModelForSeq2SeqLM if pairs else AutoModelForCausalLM
    with torch.device("meta"):
        return (AutoModelForMaskedLM if masked else loader).from_config(config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values"), VARIANTS, ids=str)
def test_the_table_names_every_tensor_of_transformers_model(name, values) -> None:
    kind = CONFIG_MAPPING[name]
    own = {k: v for k, v in SIZES.items() if k in kind().to_dict()} | values
    if name in ("llama", "granite") and not values:
        own.pop("head_dim", None)  # the hidden size over the heads
    config = kind(**own)
    model = model_of(config)
    described = needed({"model_type": name, **own})
    assert described is not None
    actual = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    actual.pop("final_logits_bias", None)  # zeros, never needed
    assert described.shapes == actual
    assert described.prefix == model.base_model_prefix
    for target, source in model.all_tied_weights_keys.items():
        assert any({target, source} <= set(names) for names in described.tied), target


@pytest.mark.parametrize("name", FAMILIES)
def test_what_config_json_leaves_out_has_transformers_value(name: str) -> None:
    """And the library reads the family's names as they are."""
    usual = CONFIG_MAPPING[name]().to_dict()
    differing = {
        key: value for key, value in FAMILIES[name].usual.items() if usual.get(key, False) != value
    }
    assert differing == {}
    assert get_checkpoint_conversion_mapping(name) is None
