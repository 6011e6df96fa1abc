"""optimum-habana on Gaudi cards; it patches transformers, so it needs a process of its own."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from workloads.base import (
    TOKENS,
    JobDescription,
    Refusal,
    Request,
    Unsupported,
    supported,
    unsupported,
)
from workloads.data.datasets import DatasetParameters
from workloads.devices.base import Device
from workloads.devices.hpu import HpuDevice, lacks_mode
from workloads.engines.base import Ability, EngineSpec, GaudiSettings, Modes, Package
from workloads.engines.images import (
    ImagePipeline,
    denoiser_name,
    facts_of,
    set_scheduler,
    weights_of,
)
from workloads.models import precision as precisions
from workloads.models.loading import open_model
from workloads.registry import WorkloadSpec, task_for
from workloads.settings import amount_in_id, load_choice
from workloads.util.processes import replaced, variables


class GaudiImageSettings(GaudiSettings):
    """Settings of optimum-habana's diffusion pipelines."""

    hpu_graphs: bool = load_choice(
        True,
        description="Capture the denoiser once for each shape and replay it (HPU graphs), in lazy "
        "mode; without, every step is collected anew.",
    )


def _refuse_generation(job: JobDescription) -> Iterator[Refusal]:
    """int4 needs a 4-bit checkpoint and one card."""
    if job.precision != "int4":
        return
    from workloads.engines.optimum_habana import quantization
    from workloads.models.catalog import known_config

    if job.cards > 1:
        reason = "checkpoints in 4 bits run on one Gaudi card"
        yield Refusal(setting="cards", reason=reason, unsupported=True)
    config = known_config(job.model)
    if config is not None and quantization.four_bit_method(config) is None:
        reason = quantization.NOT_FOUR_BIT.format(job.model)
        yield Refusal(setting="precision", reason=reason, unsupported=True)


#: Values of techniques that the library's trainers support beside the defaults.
_TRAINERS_OWN: dict[str, tuple[object, ...]] = {
    "gradient_checkpointing": (True,),
    "padding": ("fixed",),
    "strategy": ("ddp",),
    "autocast": ("bf16",),
    "learning_rate_schedule": ("linear",),
}
#: Settings of techniques supported with any value.
_TRAINERS_TAKE = ("schedule_steps", "max_gradient_norm")


def _refuse_training(job: JobDescription) -> Iterator[Refusal]:
    """The library's trainers do LoRA and full training with DDP; Nightgrid's loop does the rest."""
    from workloads.engines import default_engine
    from workloads.finetuning import refuse
    from workloads.training.methods import method_of
    from workloads.training.techniques import all_techniques

    def refusal(setting: str, reason: str) -> Refusal:
        reason = f"with the engine {SPEC.name} this version trains {reason}"
        hint = f"engine {default_engine('train')} does it, on Gaudi cards too"
        if any(other.setting == setting for other in refuse(job)):  # refused with any engine
            hint = ""
        return Refusal(setting=setting, reason=reason, hint=hint, unsupported=True)

    method = method_of(job.parameters)
    if method.method not in ("lora", "full"):
        yield refusal("method", f"LoRA and all weights, not {method.method}")
    if method.save_model:
        yield refusal("save_model", "adapters that are kept, not whole models")
    if method.held_out:
        yield refusal("held_out", "without a loss on examples that are held out")
    for kind in all_techniques():
        for name, field in kind.model_fields.items():
            value = job.parameters.get(name, field.default)
            taken = (field.default, *_TRAINERS_OWN.get(name, ()))
            if name not in _TRAINERS_TAKE and value not in taken:
                yield refusal(name, f"with its own settings, without {name} {job.parameters[name]}")


#: diffusers' pipelines whose counterparts have been tried.
_PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
#: Values of ``scheduler`` that the library supports on Gaudi.
_SCHEDULERS = (None, "own", "ddim", "euler")


def _refuse_images(job: JobDescription) -> Iterator[Refusal]:
    facts, parameters = facts_of(job.model), job.parameters
    this = f"with the engine {SPEC.name} this version"
    refused: dict[str, tuple[str, str]] = {}  # setting -> reason, hint
    if facts is not None and facts.class_name not in _PIPELINES:
        runs = " and ".join(_PIPELINES)
        refused["model"] = f"{this} runs {runs}, not {facts.class_name}", ""
    if (job.precision, job.device) in SPEC.precisions and job.precision in ("fp8", "int4"):
        reason = f"{this} stores no part of a pipeline in {job.precision}"
        refused["precision"] = reason, "write precision: bf16"
    if (scheduler := parameters.get("scheduler")) not in _SCHEDULERS:
        reason = f"{SPEC.name} has no {scheduler} for Gaudi"
        refused["scheduler"] = reason, "write scheduler: ddim or euler"
    if parameters.get("hpu_mode") == "compile":
        reason = f"{SPEC.name} runs pipelines lazily or one operation after the other"
        refused["hpu_mode"] = reason, "leave hpu_mode out"
    for name in ("channels_last", "torch_compile"):
        if parameters.get(name):
            refused[name] = f"{SPEC.name} has no {name}: true", f"leave {name} out"
    for name, (reason, hint) in refused.items():
        yield Refusal(setting=name, reason=reason, hint=hint, unsupported=True)


class Fp8CalibrationParameters(DatasetParameters):
    """The measuring pass before fp8 on Gaudi; plans add such jobs by themselves."""

    prompts: int = amount_in_id(
        32, description="How many prompts of the dataset the model is measured on."
    )
    output_tokens: int = amount_in_id(32, description="How many tokens after each prompt.")


_CALIBRATE = "workloads.engines.optimum_habana.generation:run"

SPEC = EngineSpec(
    name="optimum-habana",
    also_called=("optimum", "habana", "gaudi"),
    summary="Habana's classes with static shapes and captured graphs, and its own trainer.",
    devices=("hpu",),
    features=frozenset({"library_trainer"}),
    abilities={
        "generate": Ability(
            function="workloads.engines.optimum_habana.generation:load",
            tasks=("causal-lm", "seq2seq-lm"),
            refuse=_refuse_generation,
            settings=GaudiSettings,
            adapters=True,
            attentions=None,
        ),
        "train": Ability(
            function="workloads.engines.optimum_habana.training:run",
            tasks=("causal-lm", "masked-lm", "seq2seq-lm"),
            refuse=_refuse_training,
            settings=GaudiSettings,
            attentions=None,  # refused by ``_refuse_training``
        ),
        "calibrate": Ability(function=_CALIBRATE),
        "images": Ability(
            function="workloads.engines.optimum_habana:load_pipeline",
            refuse=_refuse_images,
            settings=GaudiImageSettings,
        ),
    },
    install="pip install optimum-habana -c constraints-hpu.txt",
    packages=(
        Package(name="optimum-habana", module="optimum.habana", below={"transformers": "4.56"}),
    ),
    preferred={"hpu": 1},
    modes={"hpu": Modes(setting="hpu_mode", names=("lazy", "compile", "eager"), lacks=lacks_mode)},
    precisions={
        ("fp32", "hpu"): supported(
            "float32 weights and products; static shapes, no key/value cache that is kept"
        ),
        ("fp16", "hpu"): unsupported(
            "optimum-habana generates in bfloat16 or float32 and its training arguments refuse "
            "fp16; write bf16"
        ),
        ("bf16", "hpu"): supported(
            "bfloat16 weights and products; static shapes, a key/value cache that is kept"
        ),
        ("fp8", "hpu"): supported(
            "Intel Neural Compressor, fp8 (e4m3) weights, activations and products with scales "
            "from a measurement on the same number of cards; the rest in bf16",
            "neural_compressor",
        ),
        ("int8", "hpu"): unsupported(
            "no int8 kernels for language models on Gaudi: the Intel Neural Compressor quantises "
            "to fp8 and uint4 there"
        ),
        ("int4", "hpu"): supported(
            "uint4 weights of a checkpoint that is quantised already (GPTQ, AWQ, AutoRound), "
            "expanded to bf16 for each product; one card"
        ),
    },
    calibrations={"fp8": "fp8-calibration"},
    calibrated_apart=True,  # inference mode and the compressor's settings stay in a process
    warmup_passes=3,  # a shape is compiled, captured and replayed
)


CALIBRATION = WorkloadSpec(
    name="fp8-calibration",
    function=_CALIBRATE,
    parameters=Fp8CalibrationParameters,
    summary="Largest values of every layer, which fp8 on Gaudi starts from.",
    ability="calibrate",
    tasks=("causal-lm",),
    throughput=TOKENS,
    implied=True,
)

SPECS = (SPEC, CALIBRATION)

_version: list[str] = []


def prepare(device: Device) -> str:
    """Patch transformers for Gaudi once in a process, in ten seconds; return the library's version.
    Only for this engine's processes (``engines.process_kind``): it patches stock models too."""
    if not _version:
        device.synchronize()  # load the bridge, which the library looks for
        # On import it prints, and runs ``pip list`` for the bridge's version: an IndexError if
        # PATH has no pip, or another environment's.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        with variables({"PATH": path}), contextlib.redirect_stdout(io.StringIO()):
            from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

            adapt_transformers_to_gaudi()
        from optimum.habana.version import __version__

        _version.append(str(__version__))
    return _version[0]


def mode_of(request: Request, device: HpuDevice) -> str:
    """Mode of a job; ``Unsupported`` if this process was started in another one."""
    mode = SPEC.mode(device.name, request.settings)
    if device.lazy() != (mode == "lazy"):
        raise Unsupported(
            f"this process was started {'with' if device.lazy() else 'without'} lazy mode "
            f"(PT_HPU_LAZY_MODE), and the job asks for hpu_mode {mode}"
        )
    return mode


_PREFIX = "Gaudi"  # of diffusers' class names


def load_pipeline(request: Request, device: Device) -> ImagePipeline:
    """Load ``request.model`` in ``request.precision`` onto the card; Unsupported if the library has
    no such pipeline, or the process has another mode.

    Each batch is one call, timed by ``ImagePipeline``: the library's timing does not wait.
    """
    version = prepare(device)
    hpu: HpuDevice = device  # type: ignore[assignment]  # prepare() takes no other
    precisions.require(request.precision, device.name, SPEC.name)
    mode = mode_of(request, hpu)
    from optimum.habana import GaudiConfig
    from optimum.habana import diffusers as gaudi_diffusers

    source = open_model(request.model)
    kind = getattr(gaudi_diffusers, _PREFIX + source.entry.checkpoint.architecture, None)
    if kind is None:
        raise Unsupported(f"optimum-habana {version} has no {source.entry.checkpoint.architecture}")
    graphs = hpu.lazy() and bool(request.settings.get("hpu_graphs", True))
    load = task_for(request.workload, source.entry).function("load")
    with _stock_text_encoder():
        pipeline = load(
            source,
            kind=kind,
            torch_dtype=precisions.compute_dtype(request.precision),
            use_habana=True,
            use_hpu_graphs=graphs,
            gaudi_config=GaudiConfig(use_torch_autocast=False),
            sdp_on_bf16=request.precision == "bf16",
            log_level=logging.ERROR,
        )
    scheduler = set_scheduler(
        pipeline, request.parameters.get("scheduler"), gaudi_diffusers, _PREFIX
    )
    return ImagePipeline(
        pipeline=pipeline,
        device=device,
        weights=weights_of(pipeline, request.precision, device.name, SPEC.name),
        random_weights=source.random_weights,
        details={
            "pipeline": type(pipeline).__name__,
            "denoiser": type(getattr(pipeline, denoiser_name(pipeline))).__name__,
            "scheduler": scheduler,
            "attention": "sdpa",
            "hpu_mode": mode,
            "hpu_graphs": "yes" if graphs else "no",
            "optimum_habana": version,
        },
        arguments=lambda count: {"batch_size": count, "throughput_warmup_steps": 0},
    )


def _stock_text_encoder() -> contextlib.AbstractContextManager[None]:
    """Use transformers' own CLIP in the block: the library's (1.21.2) fails on texts, adding a mask
    [batch, 1, length, length] to weights [batch * heads, length, length]."""
    from transformers.models.clip import modeling_clip

    own = modeling_clip.__name__
    stock = {
        name: next(one for one in kind.__mro__ if one.__module__ == own)
        for name, kind in vars(modeling_clip).items()
        if isinstance(kind, type) and kind.__module__.startswith("optimum.")
    }
    return replaced(modeling_clip, **stock)
