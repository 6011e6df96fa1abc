"""transformers' own ``generate``: static batches, left padding, one step for all prompts at once.

A batch is padded on the left, so that every prompt ends where generation starts. It runs until
each prompt has ended or the limit is reached; a prompt that ends early keeps its row busy with
padding, which is not counted. The generation config that comes with a checkpoint (temperature,
penalties, …) is put aside after loading, because ``generate`` merges it into whatever it is given:
two models would otherwise not do the same work, and one job's settings would leak into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

from workloads.attention_packages import PACKAGES, make_ready
from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines.base import Answered, Generated
from workloads.generation.loaded import LoadedModel
from workloads.models import precision
from workloads.models import precision as precisions
from workloads.models.checkpoints import read_config
from workloads.models.loading import (
    check_attention,
    load_config,
    load_tokenizer,
    open_model,
)
from workloads.models.products import origin_of
from workloads.models.rules import as_stored, kind_of
from workloads.registry import task_for
from workloads.training import adapters


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded prompts on the card; both tensors [batch, longest prompt]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor


class _Steps(StoppingCriteria):
    """Called by ``generate`` after every step; stops nothing."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._on_step()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def left_padded(prompts: Sequence[Sequence[int]], length: int, pad: int) -> Batch:
    """Prompts on the host, each up to the right end."""
    ids = torch.full((len(prompts), length), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        mask[row, length - len(prompt) :] = 1
    return Batch(ids, mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEngine(LoadedModel):
    """A causal language model in transformers, in evaluation mode, on its card."""

    model: Any
    device: Device
    pad_token_id: int

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Batch:
        longest = self.padded_length(max(len(prompt) for prompt in prompts))
        batch = left_padded(prompts, longest, self.pad_token_id)
        card = self.device.torch_device
        return Batch(batch.input_ids.to(card), batch.attention_mask.to(card))

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

    @torch.inference_mode()
    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[torch.Tensor]:
        for text, length in zip(texts, self._lengths(texts), strict=True):
            # On the right: what is causal does not see it, and real tokens keep their positions.
            ids = [*text.prompt, *text.answer]
            filled = [*ids, *[self.pad_token_id] * (length - len(ids))]
            mask = [1] * len(ids) + [0] * (length - len(ids))
            read = self._run(
                input_ids=torch.tensor([filled], device=self.device.torch_device),
                attention_mask=torch.tensor([mask], device=self.device.torch_device),
                use_cache=False,
            )
            self.device.mark_step()
            first = len(text.prompt) - 1
            yield read.logits[0, first : first + len(text.answer)].float().cpu()

    def _run(self, **inputs: Any) -> Any:
        """The model's output."""
        return self.model(**inputs)

    def _lengths(self, texts: Sequence[Answered]) -> list[int]:
        """Positions that each text is padded to: all to one where each shape is compiled."""
        own = [len(text.prompt) + len(text.answer) for text in texts]
        return own if self.device.spec.can("dynamic_shapes") else [max(own)] * len(own)

    def new_from(self, prompt_positions: int) -> int:
        """Position of the first new token in what ``generate`` returns."""
        return prompt_positions

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
        how = origin_of(Path(source.path)).get("quantization") or kind_of(config)
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
        from workloads.generation import sparse

        details["sparse_kernels"] = sparse.use_kernels(model)
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
    if "generator" in task.functions:
        made: TransformersEngine = task.function("generator")(request, positions, common)
        return made
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


def end_token_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text, by the generation config, else the model's, else the tokenizer."""
    for holder in (model.generation_config, model.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, (list, tuple)) else [found])
    return frozenset()


def pad_token_id_of(model: Any, tokenizer: Any) -> int:
    """Any id will do, since padding is masked."""
    for holder in (tokenizer, model.generation_config, model.config):
        found = getattr(holder, "pad_token_id", None)
        if isinstance(found, int):
            return found
    return 0
