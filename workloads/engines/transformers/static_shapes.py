"""transformers' models compiled with static shapes.

Prompts are padded on the left to a multiple of ``BUCKET``; ``StaticCache`` and mask span prompt
and answer from the start, so a number of rows needs two graphs per bucket: prefill and decoding.
Only the first token and the end are waited for; ended texts are checked every ``LOOK`` steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines import find_engine
from workloads.engines.loaded import Answered, Generated, Generation
from workloads.engines.torch_models import BUCKET, Batch, room_for_graphs
from workloads.engines.transformers.generation import TransformersEngine
from workloads.engines.transformers.generation import load as load_plain

LOOK = 16  # steps between checks for the end of all texts
_BY_MODE = {"hpu_mode": "compile"}  # row details of a model compiled by its card's mode


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticShapesEngine(TransformersEngine):
    """A causal language model compiled for static shapes."""

    caches: dict[tuple[int, int], Any] = field(default_factory=dict)  # the last shape's cache

    def padded_length(self, longest: int) -> int:
        return math.ceil(longest / BUCKET) * BUCKET

    @torch.no_grad()
    def generate(self, prepared: Batch, generation: Generation) -> Callable[[], Generated]:
        rows, length = prepared.input_ids.shape
        total = length + generation.output_tokens
        real = prepared.attention_mask
        cache = self._cache(rows, total)
        # Releases of transformers whose caches do not count positions take them as an argument.
        counts = any(hasattr(layer, "cumulative_length") for layer in cache.layers)
        card = real.device
        answer = torch.ones(rows, total - length, dtype=torch.bool, device=card)
        visible = torch.cat([real.bool(), answer], dim=1)[:, None, None, :]  # False on padding
        at, every = torch.arange(length, device=card), torch.arange(total, device=card)
        inputs: dict[str, Any] = {
            "input_ids": prepared.input_ids,
            "attention_mask": _added(visible & (every <= at[:, None]), self.model.dtype),
            "position_ids": (real.cumsum(-1) - 1).clamp_min(0),
        }
        mask = _added(visible & (every < length), self.model.dtype)
        position = inputs["position_ids"][:, -1:]
        tokens: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        ends = torch.tensor(sorted(generation.ends), device=card)
        ended = torch.zeros(rows, dtype=torch.bool, device=card)
        with room_for_graphs():  # once a batch, outside timed steps
            for step in range(generation.output_tokens):
                scores = self.model(
                    **inputs,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                    **({} if counts else {"cache_position": at}),
                ).logits[:, -1]
                token = scores.argmax(-1, keepdim=True)
                tokens.append(token)
                if generation.keep_logits:
                    logits.append(scores)
                self.device.mark_step()
                if step == 0:
                    generation.on_step()
                if len(ends):
                    ended = ended | torch.isin(token[:, 0], ends)
                    if step % LOOK == LOOK - 1 and bool(ended.all()):
                        break
                at, position = at[-1:] + 1, position + 1
                mask = mask.index_fill(3, at, 0.0)
                inputs = {"input_ids": token, "attention_mask": mask, "position_ids": position}
        generation.on_step()

        def fetch() -> Generated:
            return Generated(
                tokens=torch.cat(tokens, dim=1).tolist(),
                computed_tokens=rows * (length + len(tokens) - 1),
                logits=[step.float().cpu() for step in logits],
            )

        return fetch

    def _lengths(self, texts: Sequence[Answered]) -> list[int]:
        """One length for all texts, since each shape is compiled."""
        return [max(len(text.prompt) + len(text.answer) for text in texts)] * len(texts)

    def _run(self, **inputs: Any) -> Any:
        with room_for_graphs():
            return self.model(**inputs)

    def _cache(self, rows: int, total: int) -> Any:
        """A cache of this size; old content is not cleared, since the mask covers it."""
        if (rows, total) not in self.caches:
            self.caches.clear()  # free memory first
            self.caches[rows, total] = _static_cache(self.model, rows, total)
        cache = self.caches[rows, total]
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.zero_()
        return cache


def load(request: Request, device: Device) -> TransformersEngine:
    """Load ``request.model``, compiled if the job says so; see ``EngineLoader``."""
    engine = load_plain(request, device)
    by_mode = find_engine(request.engine).mode(device.name, request.settings) == "compile"
    if not by_mode and not request.settings.get("torch_compile"):
        return engine
    return compiled(engine, _BY_MODE if by_mode else {"torch_compile": "true"})


def compiled(
    engine: TransformersEngine, details: Mapping[str, str] = _BY_MODE
) -> StaticShapesEngine:
    """The engine with its model compiled for static shapes, in place; Unsupported if the model's
    class or the device's torch cannot."""
    device, model = engine.device, engine.model
    if lacking := device.cannot_compile():
        raise Unsupported(f"torch.compile: {lacking}")
    if type(engine) is not TransformersEngine:
        raise Unsupported("torch.compile: this version compiles models that are one decoder")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(base, "_can_compile_fullgraph", False):
        raise Unsupported(
            f"torch.compile: transformers says of {type(base).__name__} that it cannot run with "
            "a static cache; write hpu_mode: eager, or leave torch_compile out"
        )
    model.compile(
        backend=device.compile_backend, dynamic=False, options=dict(device.compile_options) or None
    )
    known = {name: getattr(engine, name) for name in TransformersEngine.__dataclass_fields__}
    known["details"] = {**engine.details, **details, "static_shapes": "true", "bucket": str(BUCKET)}
    return StaticShapesEngine(**known)


def _static_cache(model: Any, rows: int, total: int) -> Any:
    from transformers import StaticCache

    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with _not_marked_static():
        cache = StaticCache(
            config=config,
            max_batch_size=rows,
            max_cache_len=total,
            device=model.device,
            dtype=model.dtype,
        )
        if hasattr(cache, "early_initialization"):
            cache.early_initialization(rows, heads, width, model.dtype, model.device)
    return cache


@contextlib.contextmanager
def _not_marked_static() -> Iterator[None]:
    """Stop transformers from marking cache addresses as static in the block, which would recompile
    graphs for each new cache."""
    mark = torch._dynamo.mark_static_address
    torch._dynamo.mark_static_address = lambda *_, **__: None
    try:
        yield
    finally:
        torch._dynamo.mark_static_address = mark


def _added(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask, with a finite least number: -inf would make rows of padding NaN."""
    least = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
        ~visible, least
    )
