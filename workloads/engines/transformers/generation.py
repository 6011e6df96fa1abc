"""transformers' own ``generate`` and encoders, in static batches. A checkpoint's generation config
(temperature, …) is replaced after loading: ``generate`` would merge it into every call.

Models may be compiled with static shapes. Prompts are then padded on the left to a multiple of
``BUCKET``; ``StaticCache`` and mask span prompt and answer from the start, so a number of rows
needs two graphs per bucket: prefill and decoding. Only the first token and the end are waited for;
ended texts are checked every ``LOOK`` steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from workloads.base import BadConfiguration, Request, Unsupported
from workloads.compression import dictionary, pruning
from workloads.devices.base import Device
from workloads.engines import find_engine
from workloads.engines.loaded import Answered, Generated, Generation
from workloads.engines.torch_models import (
    BUCKET,
    Batch,
    LoadedEncoder,
    SourceReader,
    TorchModel,
    end_token_ids_of,
    pad_token_id_of,
    reading,
    room_for_graphs,
)
from workloads.inspection.checkpoints import read_config
from workloads.models import precision as precisions
from workloads.models.attention import PACKAGES, make_ready
from workloads.models.catalog import positions_of, usable_positions
from workloads.models.loading import (
    check_attention,
    load_config,
    load_tokenizer,
    open_model,
    with_new_weights,
)
from workloads.models.products import origin_of
from workloads.models.rules import as_stored, method_of
from workloads.registry import task_for
from workloads.training import saved_adapters
from workloads.util.processes import replaced


class Steps(StoppingCriteria):
    """Called by ``generate`` after every step, which may write several tokens; stops nothing."""

    def __init__(self, device: Device, on_step: Callable[[], None]) -> None:
        self.device, self.on_step = device, on_step
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self.steps += 1
        self.device.mark_step()
        self.on_step()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def written(self, new: torch.Tensor) -> torch.Tensor:
        """The tokens that the steps have written, of those behind the prompts."""
        return new


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEngine(TorchModel):
    """A model that transformers' own ``generate`` runs."""

    criterion: ClassVar[type[Steps]] = Steps

    def generate(self, prepared: Batch, generation: Generation) -> Callable[[], Generated]:
        steps = self.criterion(self.device, generation.on_step)
        output = self.model.generate(
            **prepared.inputs,
            generation_config=self.config(prepared, generation),
            stopping_criteria=StoppingCriteriaList([steps]),
            return_dict_in_generate=True,
            output_logits=generation.keep_logits,
            **self.arguments,
        )
        batch, longest = prepared.input_ids.shape

        def fetch() -> Generated:
            new = steps.written(output.sequences[:, self.new_from(longest) :])
            return Generated(
                tokens=new.tolist(),
                # The last token of each row is not fed back.
                computed_tokens=batch * (longest + new.shape[1] - 1),
                logits=[step.float().cpu() for step in output.logits or ()],
            )

        return fetch

    @property
    def arguments(self) -> dict[str, Any]:
        """Further arguments of ``generate``."""
        return {}

    def config(self, prepared: Batch, generation: Generation) -> Any:
        """A new generation config for every call."""
        return GenerationConfig(
            max_new_tokens=generation.output_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=sorted(generation.ends) or None,
            pad_token_id=self.pad_token_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqEngine(SourceReader, TransformersEngine):
    """A sequence-to-sequence model in transformers, in evaluation mode, on its card."""


def load_model(request: Request, device: Device, attention: str) -> dict[str, Any]:
    """Load ``request.model`` in ``request.precision``; return the fields ``model``, ``tokenizer``,
    ``source``, ``weights`` and ``details`` of its engine. Unsupported if this device lacks the
    precision or the attention."""
    arguments = precisions.loading_arguments(request.precision, device.name)
    if lacking := device.lacks(request.precision):
        raise Unsupported(f"{request.precision}: {lacking}")
    if attention in PACKAGES and not device.spec.can(attention):
        raise Unsupported(f"{attention} has no {device.name} kernels; use sdpa")
    make_ready(attention)
    source = open_model(request.model, protected=True)
    tokenizer = load_tokenizer(source)
    config = load_config(source)
    stored = precisions.quantized_already(config)
    if not stored:
        precisions.check_shapes(config, request.precision, device.name)
    if "quantization_config" in arguments or stored:
        arguments["device_map"] = {"": device.torch_device}
    if stored:  # the checkpoint says how
        arguments.pop("quantization_config", None)
        if precisions.quantized(request.precision):
            arguments |= as_stored(read_config(Path(source.path)))
    load = task_for(request.workload, source.entry).function("load")
    model = load(source, attn_implementation=attention, **arguments)
    if "device_map" not in arguments:
        model = model.to(device.torch_device)
    model.eval()
    precisions.finish_loading(model, request.precision, device.name)
    running = check_attention(model, attention)
    weights = precisions.inspect(model, request.precision, device.name)
    if stored:
        method = method_of(read_config(Path(source.path)))
        how = origin_of(Path(source.path)).get("quantization") or f"{method} checkpoint"
        expanded = not precisions.quantized(request.precision)
        rest = f", expanded to {request.precision}" if expanded else "; the rest in 16 bits"
        weights = replace(weights, detail=f"quantised: {how}{rest}")
    details = {"attention": running, "architecture": type(model).__name__}
    if new := getattr(model, "new_weights", ()):
        details["new_weights"] = ", ".join(new)
    return {
        "model": model,
        "tokenizer": tokenizer,
        "source": with_new_weights(source, new),
        "weights": weights,
        "details": details,
    }


def load(request: Request, device: Device) -> TransformersEngine:
    """Load ``request.model`` in ``request.precision``; see ``EngineLoader``."""
    loaded = load_model(request, device, str(request.parameters.get("attention", "sdpa")))
    model, source, details = loaded["model"], loaded["source"], loaded["details"]
    pad = pad_token_id_of(model, loaded["tokenizer"])
    end_token_ids = end_token_ids_of(model, loaded["tokenizer"])
    model.generation_config = GenerationConfig(pad_token_id=pad)
    if source.remote_code:
        details["remote_code"] = "allowed"
    if request.parameters.get("adapter"):
        details["adapter"] = saved_adapters.attach(model, str(request.parameters["adapter"]))
    tensor_parallel = int(request.parameters.get("tensor_parallel") or 1)
    if tensor_parallel > 1:
        from workloads.training.parallel.layout import Layout, make_groups
        from workloads.training.parallel.tensor import split

        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        layout = Layout(rank=rank, world_size=ranks, tensor=tensor_parallel)
        details["tensor_parallel_plan"] = split(model, layout, make_groups(layout))
        details["weight_bytes_per_card"] = str(precisions.card_weight_bytes(model))
    if sparsity := origin_of(Path(source.path)).get("sparsity"):
        details["sparsity"] = str(sparsity)
    if request.settings.get("sparse_kernels"):
        details["sparse_kernels"] = use_kernels(model)
        stored = precisions.card_weight_bytes(model)
        loaded["weights"] = replace(loaded["weights"], weight_bytes=stored)
    if request.settings.get("dictionary_products"):
        details["dictionary_products"] = use_products(model, Path(source.path))
    positions = positions_of(model.config.to_dict())
    loaded |= {"device": device, "end_token_ids": end_token_ids, "pad_token_id": pad}
    if task_for(request.workload, source.entry).encoder_decoder:
        return Seq2SeqEngine(**reading(request, positions), **loaded)
    return TransformersEngine(context_length=positions, **loaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEncoder(LoadedEncoder):
    """A masked language model in transformers, in evaluation mode, on its card."""

    model: Any

    @torch.inference_mode()
    def logits(self, prepared: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.model(**prepared.inputs).logits
        return logits


def load_encoder(request: Request, device: Device) -> TransformersEncoder:
    """Load ``request.model`` in ``request.precision``; see ``load_model``."""
    loaded = load_model(request, device, str(request.parameters.get("attention", "sdpa")))
    return TransformersEncoder(
        pad_token_id=int(loaded["tokenizer"].pad_token_id or 0),
        positions=usable_positions(loaded["model"].config.to_dict()),
        card=device.torch_device,
        **loaded,
    )


_ROWS, _COLUMNS = 32, 64  # must divide a matrix's, in 16 bits


def use_kernels(model: Any) -> str:
    """Compress a model's linear layers in place; return a description. BadConfiguration if a layer
    has more than two values in a group of four, or none fits."""
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
        if layer.out_features % _ROWS == 0 and layer.in_features % _COLUMNS == 0
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


def use_products(model: Any, directory: Path) -> str:
    """Let a model's linear layers multiply by the dictionary of its directory; return a
    description. BadConfiguration if it has none."""
    file = directory / dictionary.DICTIONARY_FILE
    if not file.is_file():
        raise BadConfiguration(
            f"dictionary_products: {directory.name} has no {file.name}; train the model with "
            "dictionary_atoms and save_model"
        )
    return f"{dictionary.use_products(model, file.read_bytes())} layers by sums of atoms"


def is_two_of_four(weight: Any) -> bool:
    """Return whether at most two of every four inputs are nonzero."""
    if weight.shape[1] % pruning.GROUP:
        return False
    values = (weight != 0).view(weight.shape[0], -1, pruning.GROUP).sum(2)
    return bool((values <= pruning.KEPT).all())


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


def load_compiled(request: Request, device: Device) -> TransformersEngine:
    """Load ``request.model``, compiled if the job says so; see ``EngineLoader``."""
    engine = load(request, device)
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
    known = {each.name: getattr(engine, each.name) for each in fields(engine)}
    known["details"] = {**engine.details, **details, "static_shapes": "true", "bucket": str(BUCKET)}
    return StaticShapesEngine(**known)


def _static_cache(model: Any, rows: int, total: int) -> Any:
    from transformers import StaticCache

    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Caches with static addresses would recompile graphs for each new cache.
    with replaced(torch._dynamo, mark_static_address=lambda *_, **__: None):
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


def _added(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask, with a finite least number: -inf would make rows of padding NaN."""
    least = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
        ~visible, least
    )
