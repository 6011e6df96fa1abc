"""ONNX Runtime: models exported once as graphs into the node's cache, keyed by model files, library
versions and options; the row has the export's time (``export_s``). Gaudi has no provider."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from workloads.base import (
    SAMPLES,
    JobDescription,
    Metric,
    Refusal,
    supported,
    unsupported,
)
from workloads.data.datasets import DatasetParameters
from workloads.engines.base import EXPORT, Ability, EngineSpec, Package, is_encoder_decoder
from workloads.registry import WorkloadSpec
from workloads.settings import Settings, amount, load_choice, work

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"  # of a calibration
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class ExportSettings(Settings):
    """Settings of a graph's export."""

    constant_folding: bool = load_choice(
        True,
        description="Fold constants and remove dead nodes at export (onnxscript's optimizer).",
    )
    fusions: bool = load_choice(
        False,
        description="Replace attention, norms and rotary positions by ONNX Runtime's own operators "
        "at export, where they are recognised.",
    )
    reordering: bool = load_choice(
        False,
        description="Move slices forward over element-wise operators, which then compute less.",
    )


class GraphSettings(ExportSettings):
    """Settings of a graph's export and execution."""

    graph_optimization: Literal["none", "basic", "extended", "all"] = load_choice(
        "all",
        description="Level of ONNX Runtime's own optimisation when a graph is opened: basic folds "
        "constants and batch norms and removes what is not needed, extended fuses operators, all "
        "chooses layouts besides.",
    )
    calibration: str | None = load_choice(
        None,
        consumes="calibration",
        pattern=_NAME,
        description="Static int8 with the ranges of activations that a job of onnx-calibration "
        "measured and keeps under this name (save_calibration); left out, int8 is dynamic: ranges "
        "are taken anew from each batch.",
    )


def _refuse(
    job: JobDescription, *, measured: bool = True, measures: bool = False
) -> Iterator[Refusal]:
    """``measured``: onnx-calibration supports the model; ``measures``: this job is one."""
    parameters = job.parameters
    folded = parameters.get("constant_folding", True)
    if parameters.get("fusions") and not folded:
        reason = "fusions are found in folded graphs only"
        yield Refusal(setting="fusions", reason=reason, hint="leave constant_folding out")
    if (job.precision == "int8" or measures) and not folded:
        yield Refusal(
            setting="constant_folding",
            reason="int8 stores the matrices of linear layers, which an unfolded graph transposes "
            "first",
            hint="leave constant_folding out",
        )
    if parameters.get("calibration") and job.precision != "int8":
        reason = f"ranges of activations are for int8, not for {job.precision}"
        hint = "write precision: int8, or leave calibration out"
        yield Refusal(setting="calibration", reason=reason, hint=hint)
    elif parameters.get("calibration") and not measured:
        reason = "onnx-calibration measures decoders and encoders only"
        hint = "leave calibration out: ranges are then taken from each batch"
        yield Refusal(setting="calibration", reason=reason, hint=hint, unsupported=True)


def _refuse_images(job: JobDescription) -> Iterator[Refusal]:
    yield from _refuse(job, measured=False)
    for name in ("torch_compile", "channels_last"):
        if job.parameters.get(name):
            reason = "it is one of torch's modules, and the U-Net is a graph"
            hint = "use the engine diffusers"
            yield Refusal(setting=name, reason=reason, hint=hint, unsupported=True)


class OnnxCalibrationParameters(DatasetParameters):
    """The measuring pass of a graph over texts, before static int8."""

    save_calibration: str = work(
        "activations",
        produces="calibration",
        pattern=_NAME,
        description="Name under which the ranges are kept, for `calibration: NAME`.",
    )
    prompts: int = amount(
        32,
        le=10000,
        description="How many prompts of the dataset the graph reads; an encoder, how many texts.",
    )
    output_tokens: int = amount(
        8, le=4096, description="How many tokens after each prompt; an encoder writes none."
    )


def _refuse_calibration(job: JobDescription) -> Iterator[Refusal]:
    yield from _refuse(job, measures=True)
    if job.precision != "fp32":
        reason = f"ranges are measured on the graph in fp32, not in {job.precision}"
        yield Refusal(setting="precision", reason=reason, hint="write precision: fp32")
    if job.cards > 1:
        yield Refusal(setting="cards", reason="one card measures a graph", hint="write cards: 1")
    if job.batch_size != 1:
        reason = "the graph reads one prompt at a time, without padding"
        hint = "write batch_size: 1, or leave it out"
        yield Refusal(setting="batch_size", reason=reason, hint=hint)


CALIBRATION = WorkloadSpec(
    name="onnx-calibration",
    function="workloads.engines.onnxruntime.calibration:run",
    parameters=OnnxCalibrationParameters,
    summary="Ranges of a graph's activations on texts, which static int8 in ONNX starts from.",
    ability="calibrate-activations",
    tasks=("causal-lm", "masked-lm"),
    throughput=SAMPLES,
)


#: On all devices.
_PRECISIONS = {
    "fp32": supported("float32 weights and products in an ONNX graph"),
    "fp16": supported(
        "a float32 graph converted to float16; operators without such kernels convert back"
    ),
    "bf16": unsupported("ONNX Runtime has few kernels in bf16; write fp16"),
    "fp8": unsupported("ONNX Runtime has no fp8 kernels for language models"),
    "int4": unsupported("this version makes no 4-bit graphs"),
}

SPEC = EngineSpec(
    name="onnxruntime",
    also_called=("onnx", "ort"),
    summary="ONNX Runtime: graphs exported once, optimised and run with bound inputs and outputs.",
    devices=tuple(PROVIDERS),
    abilities={
        "generate": Ability(
            function="workloads.engines.onnxruntime.generation:load",
            tasks=("causal-lm", "seq2seq-lm"),
            # Encoder-decoders have two graphs, so cannot be calibrated.
            refuse=lambda job: _refuse(job, measured=not is_encoder_decoder(job.model)),
            settings=GraphSettings,
        ),
        "encode": Ability(
            function="workloads.engines.onnxruntime.forward:load_encoder",
            tasks=("masked-lm",),
            refuse=_refuse,
            settings=GraphSettings,
        ),
        "images": Ability(
            function="workloads.engines.onnxruntime.forward:load_pipeline",
            refuse=_refuse_images,
            settings=GraphSettings,
        ),
        "calibrate-activations": Ability(
            function="workloads.engines.onnxruntime.calibration:run",
            tasks=("causal-lm", "masked-lm"),
            refuse=_refuse_calibration,
            settings=ExportSettings,
        ),
    },
    install="pip install onnx onnxscript onnxruntime (on NVIDIA cards onnxruntime-gpu)",
    packages=tuple(
        Package(name=name, module=name) for name in ("onnxruntime", "onnx", "onnxscript")
    ),
    precisions={
        **{(name, on): support for name, support in _PRECISIONS.items() for on in PROVIDERS},
        ("int8", "cpu"): supported(
            "int8 weights and activations of linear layers but the output layer: dynamic ranges "
            "with one scale per matrix, or (calibration) static ranges with one per output "
            "channel, in QDQ"
        ),
        ("int8", "cuda"): unsupported(
            "the CUDA provider has no integer products of linear layers, which would run on the "
            "host"
        ),
    },
    metrics=(
        EXPORT,
        Metric(
            name="session_start_s",
            title="session start",
            unit="s",
            description="Time that ONNX Runtime took to open a model's graphs and optimise them.",
            better="lower",
            ranks="largest",
        ),
        Metric(
            name="graph_bytes",
            title="graph",
            unit="bytes",
            description="Bytes of the graph's files, weights included.",
            better="lower",
        ),
        Metric(
            name="graph_nodes_exported",
            title="nodes exported",
            unit="nodes",
            description="Nodes of the graph as it was exported.",
        ),
        Metric(
            name="graph_nodes_run",
            title="nodes run",
            unit="nodes",
            description="Nodes of the graph as ONNX Runtime runs it, after its optimisation.",
            better="lower",
        ),
        Metric(
            name="largest_output_difference",
            title="largest output difference",
            description="Largest difference of any output of the graph (logits, or predicted "
            "noise) from torch's in fp32, on a padded batch before anything is timed.",
            better="lower",
            ranks="largest",
        ),
        Metric(
            name="output_spread",
            title="spread of outputs",
            description="Standard deviation of torch's outputs there, to see the difference "
            "against.",
        ),
    ),
)

SPECS = (SPEC, CALIBRATION)
