"""transformers' own ``generate``: static batches, left padding, one step for all prompts at once.

A batch is padded on the left, so that every prompt ends where generation starts. It runs until
each prompt has ended or the limit is reached; a prompt that ends early keeps its row busy with
padding, which is not counted. The generation config that comes with a checkpoint (temperature,
penalties, …) is put aside after loading, because ``generate`` merges it into whatever it is given:
two models would otherwise not do the same work, and one job's settings would leak into the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging as transformers_logging

from workloads.base import BadConfiguration, Request, Unsupported
from workloads.compression import pruning
from workloads.devices.base import Device
from workloads.engines.loaded import Generated
from workloads.engines.torch_models import (
    Batch,
    SourceReader,
    TorchModel,
    end_token_ids_of,
    pad_token_id_of,
    reading,
)
from workloads.models import precision
from workloads.models import precision as precisions
from workloads.models.attention import PACKAGES, make_ready
from workloads.models.checkpoints import read_config
from workloads.models.loading import (
    check_attention,
    load_config,
    load_tokenizer,
    open_model,
)
from workloads.models.products import origin_of
from workloads.models.rules import as_stored
from workloads.registry import task_for
from workloads.training import adapters
from workloads.training.pairs import begin_token_id


class _Steps(StoppingCriteria):
    """Called by ``generate`` after every step; stops nothing."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._on_step()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEngine(TorchModel):
    """A model that transformers' own ``generate`` runs."""

    def generate(
        self,
        prepared: Batch,
        *,
        output_tokens: int,
        ignore_eos: bool,
        on_step: Callable[[], None],
        keep_logits: bool = False,
    ) -> Callable[[], Generated]:
        def step() -> None:
            self.device.mark_step()
            on_step()

        config = self.generation_config(output_tokens, ignore_eos)
        config.return_dict_in_generate, config.output_logits = True, keep_logits
        output = self.model.generate(
            input_ids=prepared.input_ids,
            attention_mask=prepared.attention_mask,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([_Steps(step)]),
        )
        batch, longest = prepared.input_ids.shape

        def fetch() -> Generated:
            new = output.sequences[:, self.new_from(longest) :]
            # The last token of each row is produced but never fed back.
            computed = batch * (longest + max(int(new.shape[1]) - 1, 0))
            return Generated(
                tokens=new.tolist(),
                computed_tokens=computed,
                logits=[step.float().cpu() for step in output.logits or ()],
            )

        return fetch

    def generation_config(self, output_tokens: int, ignore_eos: bool) -> GenerationConfig:
        """A new one for every call. Without end-of-sequence ids nothing ends a prompt early."""
        return GenerationConfig(
            max_new_tokens=output_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=None if ignore_eos else sorted(self.end_token_ids) or None,
            pad_token_id=self.pad_token_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqEngine(SourceReader, TransformersEngine):
    """A sequence-to-sequence model in transformers, in evaluation mode, on its card."""

    source_prefix: str
    max_source_length: int
    positions: int | None

    def generation_config(self, output_tokens: int, ignore_eos: bool) -> GenerationConfig:
        config = TransformersEngine.generation_config(self, output_tokens, ignore_eos)
        config.decoder_start_token_id = begin_token_id(self.model.config)
        return config


def load(request: Request, device: Device) -> TransformersEngine:
    """Load ``request.model`` in ``request.precision``; see ``EngineLoader``."""
    transformers_logging.disable_progress_bar()  # a worker's log is no terminal
    arguments = precisions.loading_arguments(request.precision, device.name)
    lacking = device.lacks(request.precision)
    if lacking:
        raise Unsupported(f"{request.precision}: {lacking}")
    attention = str(request.parameters.get("attention", "sdpa"))
    _check_attention(attention, device)
    source = open_model(request.model, protected=True)
    tokenizer = load_tokenizer(source)
    config = load_config(source)
    stored = precisions.quantized_already(config)
    if not stored:
        precision.check_shapes(config, request.precision, device.name)
    if "quantization_config" in arguments or stored:
        arguments["device_map"] = {"": device.torch_device}
    if stored:  # the checkpoint says how
        arguments.pop("quantization_config", None)
        if precisions.quantized(request.precision):
            arguments |= as_stored(read_config(Path(source.path)))
    task = task_for(request.workload, source.entry)
    model = task.function("load")(source, attn_implementation=attention, **arguments)
    if "device_map" not in arguments:
        model = model.to(device.torch_device)
    model.eval()
    precisions.finish_loading(model, request.precision, device.name)
    check_attention(model, attention)
    end_token_ids = end_token_ids_of(model, tokenizer)
    pad_token_id = pad_token_id_of(model, tokenizer)
    model.generation_config = GenerationConfig(pad_token_id=pad_token_id)
    found_weights = precision.inspect(model, request.precision, device.name)
    if stored:
        method = read_config(Path(source.path))["quantization_config"]["quant_method"]
        how = origin_of(Path(source.path)).get("quantization") or f"{method} checkpoint"
        expanded = not precisions.quantized(request.precision)
        rest = f", expanded to {request.precision}" if expanded else "; the rest in 16 bits"
        found_weights = replace(found_weights, detail=f"quantised: {how}{rest}")
    details = {"attention": attention, "architecture": type(model).__name__}
    if source.remote_code:
        details["remote_code"] = "allowed"
    if request.parameters.get("adapter"):
        details["adapter"] = adapters.attach(model, str(request.parameters["adapter"]))
    if int(request.parameters.get("tensor_parallel") or 1) > 1:
        details["tensor_parallel_plan"] = _split(model, int(request.parameters["tensor_parallel"]))
        details["weight_bytes_per_card"] = str(precision.card_weight_bytes(model))
    if told := origin_of(Path(source.path)).get("sparsity"):
        details["sparsity"] = str(told)
    if request.settings.get("sparse_kernels"):
        details["sparse_kernels"] = use_kernels(model)
        found_weights = replace(found_weights, weight_bytes=precision.card_weight_bytes(model))
    positions = getattr(model.config, "max_position_embeddings", None)
    common: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        "source": source,
        "device": device,
        "weights": found_weights,
        "end_token_ids": end_token_ids,
        "pad_token_id": pad_token_id,
        "details": details,
    }
    if task.encoder_decoder:
        return Seq2SeqEngine(**reading(request, positions), **common)
    return TransformersEngine(context_length=positions, **common)


def _split(model: Any, tensor: int) -> str:
    """Keep this rank's part of every matrix; what was done."""
    import torch.distributed as dist

    from workloads.training.parallel.layout import Layout, make_groups
    from workloads.training.parallel.tensor import split

    layout = Layout(rank=dist.get_rank(), world_size=dist.get_world_size(), tensor=tensor)
    return split(model, layout, make_groups(layout))


def _check_attention(attention: str, device: Device) -> None:
    if attention in PACKAGES and not device.spec.can(attention):
        raise Unsupported(f"{attention} has no {device.name} kernels; use sdpa")
    make_ready(attention)


#: Sizes that the kernels want to divide a matrix's rows and columns, in 16 bits.
_ROWS, _COLUMNS = 32, 64


def use_kernels(model: Any) -> str:
    """Compress a model's linear layers in place; what was done.

    Raises:
        BadConfiguration: a layer has more than two values in a group of four, or none fits.
    """
    import torch
    from torch.sparse import to_sparse_semi_structured

    layers = pruning.prunable_layers(model)
    for name, layer in layers.items():
        if not is_two_of_four(layer.weight):
            raise BadConfiguration(
                f"sparse_kernels: {name} has more than two values in a group of four inputs; train "
                "the model with sparsity: 2:4"
            )
    fitting = [
        layer
        for layer in layers.values()
        if not (layer.out_features % _ROWS or layer.in_features % _COLUMNS)
    ]
    if not fitting:
        raise BadConfiguration(
            f"sparse_kernels: no layer has rows in multiples of {_ROWS} and inputs in multiples of "
            f"{_COLUMNS}"
        )
    for layer in fitting:
        sparse = to_sparse_semi_structured(layer.weight.detach())
        layer.weight = torch.nn.Parameter(sparse, requires_grad=False)
    return f"2:4 on the card's sparse kernels in {len(fitting)} of {len(layers)} layers"


def is_two_of_four(weight: Any) -> bool:
    """Tell if at most two of every four inputs have a value."""
    if weight.shape[1] % pruning.GROUP:
        return False
    values = (weight != 0).view(weight.shape[0], -1, pruning.GROUP).sum(2)
    return bool((values <= pruning.KEPT).all())
