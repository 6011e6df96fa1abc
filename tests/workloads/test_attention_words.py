"""Attention functions of ours compute by every word that changes the result, or refuse it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workloads.errors import Unsupported
from workloads.generation import kv_cache
from workloads.training import apart

WORK = kv_cache.Decode(kv_cache.KVCache([(1, 4)]), [[0]], torch.float32, torch.device("cpu"))
OURS: dict[str, tuple[Any, dict[str, Any]]] = {
    "KV cache": (kv_cache.attend, {"cache_pass": WORK}),
    "apart": (apart.attend, {"position_ids": torch.tensor([[0]])}),
}


@pytest.mark.parametrize("name", OURS)
def test_a_word_that_would_change_the_result_is_refused(name: str) -> None:
    """Words that are not set pass, and so do those that change nothing."""
    attend, own = OURS[name]
    module = torch.nn.Module()
    module.layer_idx = 0
    one = torch.ones(1, 1, 1, 2)
    found, _ = attend(module, one, one, one, None, softcap=None, is_causal=True, **own)
    assert torch.equal(found, one)
    for word in ("softcap", "sliding_window", "position_bias", "s_aux"):
        with pytest.raises(Unsupported, match=word):
            attend(module, one, one, one, None, **{word: 4.0}, **own)
