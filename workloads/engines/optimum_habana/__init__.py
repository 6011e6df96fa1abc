"""optimum-habana: Habana's classes of transformers, and its trainer, on Gaudi cards.

It replaces methods of transformers for the whole process, so it has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from workloads.base import JobDescription, Refusal, WorkloadError, supported, unsupported
from workloads.devices.hpu import lacks_mode
from workloads.engines.base import Ability, EngineSpec, GaudiSettings, Modes, Package
from workloads.settings import setting


class GaudiImageSettings(GaudiSettings):
    """Settings of optimum-habana's diffusion pipelines."""

    hpu_graphs: bool = setting(
        True,
        role="choice",
        loads=True,
        description="Capture the denoiser once for each shape and replay it (HPU graphs), in lazy "
        "mode; without, every step is collected anew.",
    )


def _refuse_generation(asked: JobDescription) -> Iterator[Refusal]:
    """Four bits are those of the checkpoint, and on one card."""
    if asked.precision != "int4":
        return
    from workloads.engines.optimum_habana import quantization
    from workloads.models.catalog import find_model
    from workloads.models.checkpoints import read_config

    if asked.cards > 1:
        yield Refusal(
            setting="cards",
            reason="checkpoints in 4 bits run on one Gaudi card",
            unsupported=True,
        )
    try:
        entry = find_model(asked.model)
        directory = Path(entry.location)
        config = read_config(directory) if directory.is_dir() else None
    except (WorkloadError, OSError):
        return  # the job itself will look
    if entry.kind == "embedded":
        config = {}
    if config is not None and quantization.four_bit_method(config) is None:
        named = ", ".join(quantization.FOUR_BIT)
        yield Refusal(
            setting="precision",
            reason=f"int4 on Gaudi takes checkpoints that are quantised already ({named}); "
            f"{asked.model} is not",
            unsupported=True,
        )


#: Values of techniques that the library's trainers have beside the defaults: every batch is padded
#: to one length and clipped whatever a grid says.
_TRAINERS_OWN: dict[str, tuple[object, ...]] = {
    "gradient_checkpointing": (True,),
    "padding": ("fixed",),
    "strategy": ("ddp",),
    "autocast": ("bf16",),
    "learning_rate_schedule": ("linear",),
}
#: Settings of techniques that it takes whatever their value.
_TRAINERS_TAKE = ("schedule_steps", "max_gradient_norm")


def _refuse_training(asked: JobDescription) -> Iterator[Refusal]:
    """The library's own trainers run LoRA and full training as they are, on several cards by DDP;
    Nightgrid's loop does all else."""
    from workloads.engines import default_engine
    from workloads.finetuning import refuse
    from workloads.training.methods import method_of
    from workloads.training.techniques import all_techniques

    def refusal(setting: str, reason: str) -> Refusal:
        reason = f"with the engine {SPEC.name} this version trains {reason}"
        hint = f"engine {default_engine('train')} does it, on Gaudi cards too"
        if any(other.setting == setting for other in refuse(asked)):  # whatever the engine
            hint = ""
        return Refusal(setting=setting, reason=reason, hint=hint, unsupported=True)

    method = method_of(asked.parameters)
    if method.method not in ("lora", "full"):
        yield refusal("method", f"LoRA and all weights, not {method.method}")
    if method.save_model:
        yield refusal("save_model", "adapters that are kept, not whole models")
    if method.held_out:
        yield refusal("held_out", "without a loss on examples that are held out")
    for kind in all_techniques():
        for name, field in kind.model_fields.items():
            value = asked.parameters.get(name, field.default)
            taken = (field.default, *_TRAINERS_OWN.get(name, ()))
            if name not in _TRAINERS_TAKE and value not in taken:
                yield refusal(
                    name, f"with its own settings, without {name} {asked.parameters[name]}"
                )


#: Pipelines of diffusers that have a counterpart whose use was tried.
_PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
#: Of a text-to-image job's schedulers, those that the library has for Gaudi.
_SCHEDULERS = (None, "own", "ddim", "euler")


def _refuse_images(asked: JobDescription) -> Iterator[Refusal]:
    """The library's pipelines as they are: its classes, its schedulers, its way to run a U-Net."""
    from workloads.engines.images import facts_of

    facts = facts_of(asked.model)
    if facts is not None and facts.class_name not in _PIPELINES:
        yield Refusal(
            setting="model",
            reason=f"with the engine {SPEC.name} this version runs {' and '.join(_PIPELINES)}, "
            f"not {facts.class_name}",
            unsupported=True,
        )
    if (asked.precision, asked.device) in SPEC.precisions and asked.precision in ("fp8", "int4"):
        yield Refusal(
            setting="precision",
            reason=f"with the engine {SPEC.name} this version stores no part of a pipeline in "
            f"{asked.precision}",
            hint="write precision: bf16",
            unsupported=True,
        )
    if asked.parameters.get("scheduler") not in _SCHEDULERS:
        yield Refusal(
            setting="scheduler",
            reason=f"{SPEC.name} has no {asked.parameters['scheduler']} for Gaudi",
            hint="write scheduler: ddim or euler",
            unsupported=True,
        )
    if asked.parameters.get("hpu_mode") == "compile":
        yield Refusal(
            setting="hpu_mode",
            reason=f"{SPEC.name} runs pipelines lazily or one operation after the other",
            hint="leave hpu_mode out",
            unsupported=True,
        )
    for name in ("channels_last", "torch_compile"):
        if asked.parameters.get(name):
            yield Refusal(
                setting=name,
                reason=f"{SPEC.name} has no {name}: true",
                hint=f"leave {name} out",
                unsupported=True,
            )


SPEC = EngineSpec(
    name="optimum-habana",
    also_called=("optimum", "habana", "gaudi"),
    summary="Habana's classes with static shapes and captured graphs, and its own trainer.",
    devices=("hpu",),
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
            attentions=None,  # of these its own refusal tells
        ),
        "calibrate": Ability(function="workloads.engines.optimum_habana.generation:run"),
        "images": Ability(
            function="workloads.engines.optimum_habana.images:load",
            refuse=_refuse_images,
            settings=GaudiImageSettings,
        ),
    },
    install="pip install 'nightgrid[hpu]' -c constraints-hpu.txt",
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
