"""optimum-habana on Gaudi cards; it patches transformers, so it needs a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.base import JobDescription, Refusal, supported, unsupported
from workloads.devices.hpu import lacks_mode
from workloads.engines.base import Ability, EngineSpec, GaudiSettings, Modes, Package
from workloads.settings import setting
from workloads.util.processes import variables

if TYPE_CHECKING:
    from workloads.devices.base import Device


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
    """int4 needs a 4-bit checkpoint and one card."""
    if asked.precision != "int4":
        return
    from workloads.engines.optimum_habana import quantization
    from workloads.models.catalog import known_config

    if asked.cards > 1:
        reason = "checkpoints in 4 bits run on one Gaudi card"
        yield Refusal(setting="cards", reason=reason, unsupported=True)
    config = known_config(asked.model)
    if config is not None and quantization.four_bit_method(config) is None:
        reason = quantization.NOT_FOUR_BIT.format(asked.model)
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


def _refuse_training(asked: JobDescription) -> Iterator[Refusal]:
    """The library's trainers do LoRA and full training with DDP; Nightgrid's loop does the rest."""
    from workloads.engines import default_engine
    from workloads.finetuning import refuse
    from workloads.training.methods import method_of
    from workloads.training.techniques import all_techniques

    def refusal(setting: str, reason: str) -> Refusal:
        reason = f"with the engine {SPEC.name} this version trains {reason}"
        hint = f"engine {default_engine('train')} does it, on Gaudi cards too"
        if any(other.setting == setting for other in refuse(asked)):  # refused with any engine
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


#: diffusers' pipelines whose counterparts have been tried.
_PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
#: Values of ``scheduler`` that the library supports on Gaudi.
_SCHEDULERS = (None, "own", "ddim", "euler")


def _refuse_images(asked: JobDescription) -> Iterator[Refusal]:
    """Refuse what the library's pipelines lack."""
    from workloads.engines.images import facts_of

    facts, parameters = facts_of(asked.model), asked.parameters
    this = f"with the engine {SPEC.name} this version"
    refused: dict[str, tuple[str, str]] = {}  # setting -> reason, hint
    if facts is not None and facts.class_name not in _PIPELINES:
        runs = " and ".join(_PIPELINES)
        refused["model"] = f"{this} runs {runs}, not {facts.class_name}", ""
    if (asked.precision, asked.device) in SPEC.precisions and asked.precision in ("fp8", "int4"):
        reason = f"{this} stores no part of a pipeline in {asked.precision}"
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
            attentions=None,  # refused by ``_refuse_training``
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
