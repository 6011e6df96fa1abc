"""vLLM: continuous batching on NVIDIA cards; ``vllm_gaudi_engine.py`` has what Gaudi cards add.

Written after vLLM's documentation of ``LLMEngine``; nobody has run it with Nightgrid yet. Prompts
of a batch are handed over together and vLLM decides how to step through them, so only the moment
when every prompt has its first token and the end are told. Reading prompts from an earlier pass's
cache would measure nothing, so prefix caching is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from workloads import precision as precisions
from workloads.api import Request
from workloads.devices.base import Device
from workloads.engines.base import Generated
from workloads.errors import Unsupported
from workloads.generation.loaded import LoadedModel
from workloads.models.loading import load_tokenizer, open_model
from workloads.models.shards import inspect, source_files
from workloads.weights import ModelWeights

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngine(LoadedModel):
    """A model in vLLM, on this process's card."""

    llm: Any  # vllm.LLM
    numbers: count[int] = field(default_factory=count)

    def prepare(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": list(prompt)} for prompt in prompts]

    def generate(
        self,
        prepared: list[dict[str, list[int]]],
        *,
        output_tokens: int,
        ignore_eos: bool,
        on_step: Callable[[], None],
        keep_logits: bool = False,
    ) -> Callable[[], Generated]:
        from vllm import SamplingParams

        if keep_logits:
            raise Unsupported("vLLM gives no logits, so this engine cannot be verified by them")
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=[] if ignore_eos else sorted(self.end_token_ids),
            detokenize=False,
        )
        engine = self.llm.llm_engine
        names = [f"nightgrid-{next(self.numbers)}" for _ in prepared]
        for name, prompt in zip(names, prepared, strict=True):
            engine.add_request(name, prompt, parameters)
        found: dict[str, list[int]] = {name: [] for name in names}
        began = False
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
            if not began and all(found.values()):
                began = True
                on_step()
        on_step()
        tokens = [found[name] for name in names]
        read = sum(len(prompt["prompt_token_ids"]) for prompt in prepared)
        written = sum(max(len(ids) - 1, 0) for ids in tokens)
        return lambda: Generated(tokens=tokens, computed_tokens=read + written)


def load(request: Request, device: Device, **arguments: Any) -> VllmEngine:
    """Load ``request.model`` in ``request.precision``; see ``EngineLoader``. ``arguments`` are more
    of ``LLM``'s."""
    precisions.require(request.precision, device.name, request.engine)
    if request.parameters.get("adapter"):
        raise Unsupported(f"with the engine {request.engine} this version puts on no adapters")
    from vllm import LLM

    source = open_model(request.model)
    tokenizer = load_tokenizer(source)
    llm = LLM(
        model=source.path,
        tokenizer=source.tokenizer_path,
        dtype=DTYPES[request.precision],
        trust_remote_code=source.remote_code,
        enable_prefix_caching=False,
        max_num_seqs=request.batch_size,
        **arguments,
    )
    config = llm.llm_engine.model_config.hf_config
    ends = getattr(config, "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    tensors = inspect(source_files(Path(source.path))).values()
    means = precisions.support(request.precision, device.name, request.engine).means
    return VllmEngine(
        llm=llm,
        tokenizer=tokenizer,
        source=source,
        weights=ModelWeights(
            weight_bytes=sum(tensor.bytes for tensor in tensors),
            parameter_count=sum(math.prod(tensor.shape) for tensor in tensors),
            quantized_share=0.0,
            detail=f"{means} (sizes are those of the checkpoint)",
        ),
        end_token_ids=frozenset(ends if isinstance(ends, (list, tuple)) else [ends]),
        context_length=getattr(config, "max_position_embeddings", None),
        details={"architecture": str((config.architectures or ["unknown"])[0])},
    )
