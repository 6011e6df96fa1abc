"""Encoders in transformers' own classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from workloads.base import Request
from workloads.devices.base import Device
from workloads.engines.torch_models import Batch, LoadedEncoder
from workloads.engines.transformers.generation import load_model
from workloads.models.catalog import usable_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEncoder(LoadedEncoder):
    """A masked language model in transformers, in evaluation mode, on its card."""

    model: Any

    @torch.inference_mode()
    def logits(self, prepared: Batch) -> torch.Tensor:
        ids, mask = prepared.input_ids, prepared.attention_mask
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).logits
        return logits


def load(request: Request, device: Device) -> TransformersEncoder:
    """Load ``request.model`` in ``request.precision``; see ``load_model``."""
    loaded = load_model(request, device, "sdpa")
    return TransformersEncoder(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        source=loaded.source,
        weights=loaded.weights,
        pad_token_id=int(loaded.tokenizer.pad_token_id or 0),
        positions=usable_positions(loaded.model.config.to_dict()),
        card=device.torch_device,
        details={"attention": "sdpa", "architecture": type(loaded.model).__name__},
    )
