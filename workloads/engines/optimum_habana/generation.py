"""optimum-habana's ``generate`` on a Gaudi card: every step of one shape, captured once.

The bridge compiles a graph for every shape, in seconds, so shapes are static: prompts are padded on
the left to a multiple of ``BUCKET``, the key/value cache holds prompt and answer from the start,
and a counter on the card is the position in it. Only the first token (TTFT) and the end are waited
for, so that the host runs ahead of the card. ChatGLM3 uses its original layout: the library has no
static shapes for transformers' GLM class.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from workloads.base import JobContext, Request, Result, Unsupported
from workloads.data.datasets import load_dataset
from workloads.devices.base import Device
from workloads.devices.hpu import HpuDevice
from workloads.devices.monitor.gaudi import fp8_scales
from workloads.engines.loaded import Generated, Generation
from workloads.engines.optimum_habana import (
    SPEC,
    Fp8CalibrationParameters,
    mode_of,
    prepare,
    quantization,
)
from workloads.engines.passes import encoded_prompts, generate_once, result_of
from workloads.engines.torch_models import (
    BUCKET,  # also the size of cache reads
    Batch,
    SourceReader,
    end_token_ids_of,
    pad_token_id_of,
    reading,
)
from workloads.engines.transformers.generation import Steps, TransformersEngine
from workloads.inspection.checkpoints import read_config
from workloads.models import precision as precisions
from workloads.models.catalog import positions_of
from workloads.models.loading import ModelSource, load_config, load_tokenizer, open_model
from workloads.registry import task_for
from workloads.training import saved_adapters

ENGINE = SPEC.name
CALIBRATION = SPEC.calibrations["fp8"]  # the workload that measures what fp8 needs


#: Attributes of the decoder, which is what torch.compile gets.
_DECODERS = ("transformer", "gpt_neox", "model")


class GaudiSteps(Steps):
    """``Steps`` in the library's convention; reports the first step only."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **given: Any) -> Any:
        self.steps += 1
        if self.steps == 1:
            self.on_step()
        if given.get("needs_tensor_output"):
            return torch.zeros(input_ids.shape[0], dtype=torch.int8, device=input_ids.device)
        return False

    def written(self, new: torch.Tensor) -> torch.Tensor:
        return new[:, : self.steps]  # shapes are static: there is padding behind them


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimumHabanaEngine(TransformersEngine):
    """A model under optimum-habana's patches, on its card."""

    criterion = GaudiSteps
    lazy: bool
    usual: Mapping[str, Any]  # the library's settings of all calls
    original_config: Any  # the model's generation config after loading; ``generate`` writes into it

    def padded_length(self, longest: int) -> int:
        return math.ceil(longest / BUCKET) * BUCKET if self.usual["static_shapes"] else longest

    def generate(self, prepared: Batch, generation: Generation) -> Callable[[], Generated]:
        self.model.generation_config = copy.deepcopy(self.original_config)
        fetch = TransformersEngine.generate(self, prepared, generation)
        self.device.mark_step()
        generation.on_step()
        return fetch

    @property
    def arguments(self) -> dict[str, Any]:
        return {"lazy_mode": self.lazy, "hpu_graphs": self.lazy}

    def config(self, prepared: Batch, generation: Generation) -> Any:
        """A new config for every call; a causal mask only without padding, as it hides none."""
        from optimum.habana.transformers.generation import GaudiGenerationConfig

        ends = sorted(generation.ends) or None
        unpadded = self.usual["use_flash_attention"] and bool(prepared.attention_mask.all())
        return GaudiGenerationConfig(
            max_new_tokens=generation.output_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=ends,
            pad_token_id=self.pad_token_id,
            ignore_eos=ends is None,
            flash_attention_causal_mask=unpadded,
            **self.usual,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimumHabanaSeq2Seq(SourceReader, OptimumHabanaEngine):
    """A sequence-to-sequence model under optimum-habana's patches, on its card."""


def load(request: Request, device: Device) -> OptimumHabanaEngine:
    """Load ``request.model`` in ``request.precision``; see ``EngineLoader``."""
    version = prepare(device)
    from optimum.habana.checkpoint_utils import model_is_optimized
    from optimum.habana.transformers.generation import GaudiGenerationConfig

    transformers_logging.set_verbosity_error()  # it logs its defaults at every call
    hpu: HpuDevice = device  # type: ignore[assignment]  # prepare() takes no other
    precisions.require(request.precision, device.name, ENGINE)
    mode = mode_of(request, hpu)
    source = open_model(request.model, layout="original")
    tokenizer = load_tokenizer(source)
    model = load_model(source, request, hpu)
    static = bool(model_is_optimized(model.config))
    model.eval()
    model = model.to(device.torch_device)
    end_token_ids = _end_token_ids(model, tokenizer)
    pad_token_id = pad_token_id_of(model, tokenizer)
    weights = precisions.inspect(model, request.precision, device.name, ENGINE)
    attention = str(request.parameters.get("attention", "sdpa"))
    details = {
        "attention": attention,
        "architecture": type(model).__name__,
        "optimum_habana": version,
        "hpu_mode": mode,
        "static_shapes": str(static).lower(),
    }
    if request.precision == "fp8" and (scales := fp8_scales(device.device_name())):
        details["fp8_scales"] = scales
    if request.parameters.get("adapter"):
        details["adapter"] = saved_adapters.attach(model, str(request.parameters["adapter"]))
    if mode == "lazy":
        model = hpu.capture_graphs(model)
    elif mode == "compile":
        details["compiled"] = _compile(model, hpu)
    kept_cache = static and request.precision != "fp32" and hasattr(model, "allocate_kv_cache")
    flash, sixteen_bits = attention == "sdpa", request.precision != "fp32"
    details |= {
        "kept_cache": str(kept_cache).lower(),
        "bucket": str(BUCKET if static else 0),
        "fast_softmax": str(flash and sixteen_bits).lower(),
    }
    if request.precision == "fp8" or request.workload == CALIBRATION:
        hpu.after_quantized_loading(model)
    loaded: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        "source": source,
        "device": device,
        "weights": weights,
        "end_token_ids": end_token_ids,
        "pad_token_id": pad_token_id,
        "details": details,
        "lazy": mode == "lazy",
        "usual": {
            "static_shapes": static,
            "trim_logits": True,
            "reuse_cache": kept_cache,
            "bucket_internal": kept_cache,
            "bucket_size": BUCKET if kept_cache else -1,
            "limit_hpu_graphs": False,
            "attn_softmax_bf16": sixteen_bits,
            "use_flash_attention": flash,
            "flash_attention_recompute": flash,
            "flash_attention_fast_softmax": flash and sixteen_bits,
        },
        "original_config": GaudiGenerationConfig(pad_token_id=pad_token_id),
    }
    positions = positions_of(model.config.to_dict())
    if getattr(model.config, "is_encoder_decoder", False):
        return OptimumHabanaSeq2Seq(**reading(request, positions), **loaded)
    return OptimumHabanaEngine(context_length=positions, **loaded)


def load_model(source: ModelSource, request: Request, device: HpuDevice) -> Any:
    """Load a model on the host by its task, in the library's patched classes; DataMissing if fp8
    has no calibration, Unsupported for int4 without a 4-bit checkpoint."""
    arguments: dict[str, Any] = {"torch_dtype": precisions.compute_dtype(request.precision)}
    measured = request.workload == CALIBRATION
    if request.precision == "fp8" or measured:
        device.before_quantized_loading()
    if request.precision == "int4":
        config = read_config(Path(source.path))
        arguments |= quantization.four_bit_arguments(config, request.model)
    config = load_config(source)
    if getattr(config, "model_type", "") == "chatglm":
        # The library's ChatGLM needs both, which early checkpoints' configs lack.
        config.torch_dtype = arguments["torch_dtype"]  # of the reused key/value cache
        config.original_rope = getattr(config, "original_rope", True)
    load = task_for(request.workload, source.entry).function("load")
    model = load(source, config=config, **arguments)
    if request.precision == "int4":
        quantization.pack_for_the_card(model)
    if request.precision == "fp8" or measured:
        cards = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        directory = quantization.calibration_directory(request.model, cards, device.device_name())
        if measured:
            model = quantization.start_measuring(model, directory)
        else:
            model = quantization.quantize(model, request, directory)
    return model


def _compile(model: Any, device: HpuDevice) -> str:
    for name in _DECODERS:
        decoder = getattr(model, name, None)
        if isinstance(decoder, torch.nn.Module):
            compiled = torch.compile(
                decoder, backend=device.compile_backend, options=dict(device.compile_options)
            )
            setattr(model, name, compiled)
            return name
    raise Unsupported(f"hpu_mode compile: {type(model).__name__} has no decoder of a known name")


def _end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End tokens; ChatGLM3's original config names only one of three."""
    if getattr(model.config, "model_type", "") != "chatglm":
        return end_token_ids_of(model, tokenizer)
    from workloads.models.chatglm3.layout import END

    ends = (END, "<|user|>", "<|observation|>")
    return frozenset(int(tokenizer.convert_tokens_to_ids(token)) for token in ends)


def run(request: Request, context: JobContext) -> Result:
    """Measure; see ``workloads.base.Workload``."""
    parameters = Fp8CalibrationParameters.model_validate(dict(request.parameters))
    device = context.device
    prepare(device)
    precisions.require("fp8", device.name, ENGINE)
    context.enter_phase("load")
    began = context.clock()
    context.resident(f"{request.residency_key}|measured", lambda: None)  # evict other models
    engine = load(request, device)
    load_s = context.clock() - began
    dataset = load_dataset(request.dataset, parameters.reading())
    prompts = encoded_prompts(engine, dataset, parameters.prompts)
    context.enter_phase("measure")
    generation = Generation(output_tokens=parameters.output_tokens, on_step=device.synchronize)
    _, sample = generate_once(engine, context, prompts, request.batch_size, generation)
    directory = quantization.calibration_directory(
        request.model, context.world_size, device.device_name()
    )
    facts = {
        "model": request.model,
        "cards": context.world_size,
        "device": device.device_name(),
        "dataset": request.dataset,
        "prompts": parameters.prompts,
        "output_tokens": parameters.output_tokens,
    }
    quantization.stop_measuring(engine.model, directory, facts)
    return result_of(
        engine, dataset, sample, load_s=load_s, details={"calibration": str(directory)}
    )
