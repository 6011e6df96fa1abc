"""OpenVINO GenAI on CPUs: paged attention and continuous batching over a graph in the node's cache.
Keys and values have the type of products; the library's default of 8 bits would change results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workloads.base import JobDescription, Metric, Refusal, supported, unsupported
from workloads.devices.cpu import BF16, CORES
from workloads.engines.base import EXPORT, Ability, EngineSpec, Package
from workloads.models.catalog import checkpoint_kind

#: With one thread the library (2025.4 to 2026.4) divides by zero when opening bf16 weights.
BF16_THREADS = 2


def _refuse(job: JobDescription) -> Iterator[Refusal]:
    threads = job.parameters.get("threads")
    if job.precision == "bf16" and threads is not None and threads < BF16_THREADS:
        reason = f"OpenVINO ends its process in bf16 with fewer threads than {BF16_THREADS}"
        hint = f"write threads: {BF16_THREADS} or more, or leave out `engine:`"
        yield Refusal(setting="threads", reason=reason, hint=hint, unsupported=True)
    if job.parameters.get("profile"):
        reason = "torch's profiler sees no operators of OpenVINO"
        hint = "leave profile out, or use the engine transformers"
        yield Refusal(setting="profile", reason=reason, hint=hint, unsupported=True)


def _faster(model: str, precision: str, versions: Mapping[str, str]) -> bool:
    """Return whether to prefer it. Its int8 and int4 differ from the default engine's; it refuses
    bf16 without bf16 instructions, or on two cores, of which a job has one."""
    if precision not in ("fp32", "bf16"):
        return False
    cores = int(versions.get(CORES, BF16_THREADS + 1))
    if precision == "bf16" and (BF16 not in versions or cores <= BF16_THREADS):
        return False
    kind = checkpoint_kind(model)
    return kind is not None and kind.architecture == "LlamaForCausalLM"  # measured


_COMPUTES = "products and key/value cache in bfloat16, where the CPU has instructions for it"

SPEC = EngineSpec(
    name="openvino",
    also_called=("openvino-genai", "ov"),
    summary="OpenVINO GenAI: paged attention and continuous batching over a converted graph.",
    devices=("cpu",),
    abilities={
        "generate": Ability(
            function="workloads.engines.openvino.generation:load",
            tasks=("causal-lm",),
            refuse=_refuse,
        )
    },
    install="pip install openvino openvino-genai nncf",
    packages=(
        Package(name="openvino", module="openvino"),
        Package(name="openvino-genai", module="openvino_genai"),
    ),
    preferred={"cpu": 1},
    preferred_for=_faster,
    in_images=False,
    features=frozenset({"continuous_batching"}),
    sees_whole_texts=True,
    counts_compilations=False,  # the library compiles kernels without counting them
    precisions={
        ("fp32", "cpu"): supported("float32 weights, products and key/value cache"),
        ("bf16", "cpu"): supported(f"weights, {_COMPUTES}"),
        ("fp16", "cpu"): unsupported("OpenVINO computes in fp16 on few CPUs; write bf16"),
        ("fp8", "cpu"): unsupported("OpenVINO has no fp8 products on CPUs"),
        ("int8", "cpu"): supported(
            f"int8 weights with one scale a row, embeddings too; {_COMPUTES}", "nncf"
        ),
        ("int4", "cpu"): supported(
            "4-bit weights with one scale for 64 weights of a row, embeddings and the output layer "
            f"in int8; {_COMPUTES}",
            "nncf",
        ),
    },
    metrics=(
        EXPORT,
        Metric(
            name="pipeline_start_s",
            title="pipeline start",
            unit="s",
            description="Time that OpenVINO GenAI took to open a model's graph and compile it.",
            better="lower",
            ranks="largest",
        ),
    ),
)
