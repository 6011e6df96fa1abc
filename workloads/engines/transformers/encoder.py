"""Encoders in transformers' own classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines.torch_models import Batch, LoadedEncoder
from workloads.models import precision
from workloads.models import precision as precisions
from workloads.models.catalog import usable_positions
from workloads.models.loading import load_tokenizer, open_model
from workloads.registry import task_for


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEncoder(LoadedEncoder):
    """A masked language model in transformers, in evaluation mode, on its card."""

    model: Any

    @torch.inference_mode()
    def logits(self, prepared: Batch) -> torch.Tensor:
        found: torch.Tensor = self.model(
            input_ids=prepared.input_ids, attention_mask=prepared.attention_mask
        ).logits
        return found


def load(request: Request, device: Device) -> TransformersEncoder:
    """Load ``request.model`` in ``request.precision`` onto the card.

    Raises:
        DataMissing: the model is not there.
        Unsupported: the precision cannot be had on this device.
    """
    arguments = precisions.loading_arguments(request.precision, device.name)
    if lacking := device.lacks(request.precision):
        raise Unsupported(f"{request.precision}: {lacking}")
    if "quantization_config" in arguments:
        arguments["device_map"] = {"": device.torch_device}
    source = open_model(request.model)
    tokenizer = load_tokenizer(source)
    task = task_for(request.workload, source.entry)
    model = task.function("load")(source, attn_implementation="sdpa", **arguments)
    if "device_map" not in arguments:
        model = model.to(device.torch_device)
    model.eval()
    precisions.finish_loading(model, request.precision, device.name)
    return TransformersEncoder(
        model=model,
        tokenizer=tokenizer,
        source=source,
        weights=precision.inspect(model, request.precision, device.name),
        pad_token_id=int(tokenizer.pad_token_id or 0),
        positions=usable_positions(model.config.to_dict()),
        card=device.torch_device,
        details={"attention": "sdpa", "architecture": type(model).__name__},
    )
