"""Parts of decoders that depend on a text's length, held against what transformers computes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from finetuning_cases import small_model

from workloads.base import Unsupported
from workloads.engines.graph import layers
from workloads.engines.openvino.generation import window_of
from workloads.models import rules

_LONG = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@torch.inference_mode()
def sees_all(model: Any, length: int) -> bool:
    """Tell if attention to all that stands before gives the model's own logits."""
    ids = torch.arange(length)[None] * 7 % 96
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    return torch.allclose(
        model(input_ids=ids).logits,
        model(input_ids=ids, attention_mask=mask).logits,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("kind", "changes", "window"),
    [
        ("mistral", {"sliding_window": 12}, 12),
        ("mistral", {"sliding_window": None}, None),
        ("gemma2", {"sliding_window": 12}, 12),
        ("qwen2", {"sliding_window": 12}, None),
        ("qwen2", {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1}, 12),
        ("llama", {}, None),
    ],
)
def test_up_to_its_window_a_model_sees_all(kind, changes, window) -> None:
    """And a token beyond it not: a graph that attends to all would compute something else there.
    Engines with attention of their own refuse just those models."""
    model = small_model(kind, **changes).eval()
    assert window_of(model) == window
    narrow = rules.narrow_layers(json.loads(model.config.to_json_string()))
    assert min(narrow.values(), default=None) == window  # as a plan reads it
    assert sees_all(model, window or 40)
    assert sees_all(model, (window or 40) + 1) == (window is None)
    if window is not None:
        assert layers.misfit(model)


def test_layers_without_a_number_of_positions_become_no_graph() -> None:
    model = small_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(Unsupported, match=r"see a part of the text only \(linear_attention\)"):
        window_of(model)


@pytest.mark.parametrize(
    ("rope", "moves"),
    [
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, True),
        ({"rope_type": "longrope", **_LONG, **_FACTORS}, True),
        ({"rope_type": "yarn", **_LONG}, False),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, False),
        ({"rope_type": "default", "rope_theta": 10000.0}, False),
    ],
)
@torch.inference_mode()
def test_angles_that_depend_on_the_length_are_refused(rope, moves) -> None:
    model = small_model(rope_parameters=rope).eval()
    table = [model.model.rotary_emb(torch.zeros(1), torch.arange(n)[None])[0] for n in (9, 90)]
    assert torch.allclose(table[0], table[1][:, :9]) != moves
    assert (rules.moving_rotation(model) == rope["rope_type"]) == moves
    if moves:
        for refuse in (window_of, lambda one: layers.read_decoder(one, positions=64)):
            with pytest.raises(Unsupported, match="rotary positions"):
                refuse(model)
    else:
        assert window_of(model) is None
