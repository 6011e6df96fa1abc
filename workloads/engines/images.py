"""diffusers' text-to-image pipelines: facts for the plan (from JSON files), loading, generation."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, DataMissing, WorkloadError
from workloads.devices.base import Device
from workloads.inspection.checkpoints import UnusableFile, read_object
from workloads.inspection.weights import reported, require_loaded
from workloads.models import precision as precisions
from workloads.models.catalog import find_model, pipeline_index
from workloads.models.loading import ModelSource
from workloads.models.precision import ModelWeights
from workloads.util.processes import replaced

DENOISERS = ("unet", "transformer")  # a pipeline has one of these parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts:
    """The parts of a pipeline."""

    class_name: str
    denoiser: str  # the part's name; "": no known one
    reads_text: bool
    scheduler: str  # class of its own scheduler
    guided: bool  # takes a guidance scale; True if unknown


def facts_of(model: str) -> PipelineFacts | None:
    """Facts of a pipeline by model name; None if unknown here."""
    try:
        index = pipeline_index(model)
        directory = Path(find_model(model, weights=False).location)
    except (WorkloadError, OSError):
        return None  # reported when the model is opened
    if index is None:
        return None
    denoiser = next((part for part in DENOISERS if _class_of(index, part)), "")
    config: Mapping[str, Any] = {}
    if denoiser:
        with contextlib.suppress(UnusableFile):  # loading names it
            config = read_object(directory / denoiser / "config.json") or {}
    return PipelineFacts(
        class_name=str(index.get("_class_name") or "unknown"),
        denoiser=denoiser,
        reads_text=bool(_class_of(index, "text_encoder")),
        scheduler=_class_of(index, "scheduler"),
        guided=config.get("guidance_embeds") is not False,
    )


def _class_of(index: Mapping[str, Any], part: str) -> str:
    entry = index.get(part)
    return str(entry[-1] or "") if isinstance(entry, list) and entry else ""


#: Setting -> diffusers' class.
SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "dpm-solver": "DPMSolverMultistepScheduler",
}
OWN_SCHEDULER = "own"  # keep the pipeline's
USUAL_SCHEDULER = "ddim"  # default with a U-Net, so that jobs compare


def load_pipeline(source: ModelSource, *, kind: Any = None, **arguments: Any) -> Any:
    """Load a pipeline on the host, as class ``kind`` or diffusers' own, without the safety checker,
    which would examine every image; DataMissing if a part is missing, or cannot be read."""
    import diffusers
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers.utils.logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    if "safety_checker" in (pipeline_index(source.path) or {}):
        arguments |= {"safety_checker": None, "requires_safety_checker": False}
    try:
        with _reports() as reports:
            pipeline = (kind or diffusers.AutoPipelineForText2Image).from_pretrained(
                source.path, trust_remote_code=False, **arguments
            )
    except OSError as error:
        raise DataMissing(f"cannot load the pipeline in {source.path}: {error}") from error
    except ValueError as error:
        if "AutoPipeline can't find a pipeline" not in str(error):
            raise
        raise BadConfiguration(
            f"{source.entry.name} is a {source.entry.checkpoint.architecture}, which diffusers "
            "does not know as a pipeline that makes images from texts"
        ) from error
    for part, report in reports:
        require_loaded(reported(report, 0), part)
    if denoiser_name(pipeline) == "":
        raise BadConfiguration(f"{type(pipeline).__name__} has neither U-Net nor transformer")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextlib.contextmanager
def _reports() -> Iterator[list[tuple[str, Mapping[str, Any]]]]:
    """Yield the path and loading report of each model that is loaded in the block: pipelines load
    their models without asking for them."""
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    reports: list[tuple[str, Mapping[str, Any]]] = []

    def reporting(kind: Any) -> contextlib.AbstractContextManager[None]:
        original: Any = vars(kind)["from_pretrained"]

        def load(cls: type, path: Any, *arguments: Any, **options: Any) -> Any:
            asked = {**options, "output_loading_info": True}
            model, report = original.__func__(cls, path, *arguments, **asked)
            reports.append((str(path), report))
            return model

        return replaced(kind, from_pretrained=classmethod(load))

    with reporting(ModelMixin), reporting(PreTrainedModel):
        yield reports


def denoiser_name(pipeline: Any) -> str:
    """Name of the denoising part; "" if there is no known one."""
    return next((part for part in DENOISERS if getattr(pipeline, part, None) is not None), "")


def set_scheduler(pipeline: Any, name: str | None, classes: Any, prefix: str = "") -> str:
    """Set the job's scheduler, with the config of the pipeline's own; return its class name.
    ``classes`` is the module with the classes, whose names start with ``prefix``."""
    name = name or (USUAL_SCHEDULER if denoiser_name(pipeline) == DENOISERS[0] else OWN_SCHEDULER)
    if name != OWN_SCHEDULER:
        kind = getattr(classes, prefix + SCHEDULERS[name])
        if type(pipeline.scheduler) is not kind:
            pipeline.scheduler = kind.from_config(pipeline.scheduler.config)
    return type(pipeline.scheduler).__name__


#: Default with a U-Net, as in diffusers and optimum-habana.
USUAL_GUIDANCE = 7.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Painted:
    """Images of one batch, and the seconds of each part, which add up to the batch's."""

    images: Sequence[Any]  # PIL's
    text_encoding_s: float
    denoising_s: float
    decoding_s: float
    conversion_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePipeline:
    """A pipeline on its card. Timers wrap the library's methods between parts and synchronize it,
    four times a batch, never within the denoising loop. Each image's latents are drawn on the CPU
    in fp32 from its own seed, so they do not depend on device, precision or batch."""

    pipeline: Any
    device: Device
    weights: ModelWeights
    random_weights: bool
    details: Mapping[str, str]
    figures: Mapping[str, float] = field(default_factory=dict)  # of its engine's ``metrics``
    clock: Callable[[], float] = time.perf_counter
    arguments: Callable[[int], Mapping[str, Any]] = lambda count: {}  # of calls, by batch size
    #: Context of calls; the library itself only disables gradients.
    mode: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    _moments: dict[str, float] = field(default_factory=dict)
    _seeds: list[int] = field(default_factory=list)  # of the current batch

    def __post_init__(self) -> None:
        pipeline = self.pipeline
        self._in_clock(pipeline, "encode_prompt", after="encoded")
        self._in_clock(pipeline.vae, "decode", before="denoised", after="decoded")
        pipeline.prepare_latents = drawn_by(pipeline.prepare_latents, self._seeds)

    def paint(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        steps: int,
        guidance: float | None,
        height: int | None,
        width: int | None,
    ) -> Painted:
        """Generate an image for each prompt, from the latents of its seed."""
        scale = self.guidance(guidance)
        guided = {"guidance_scale": scale} if scale is not None else {}
        if (height is None) != (width is None):  # the library would replace both
            height, width = height or own_side(self.pipeline), width or own_side(self.pipeline)
        self._seeds[:] = seeds
        self._moments.clear()
        began = self.clock()
        with self.mode():
            images = self.pipeline(
                prompt=list(prompts),
                num_inference_steps=steps,
                height=height,
                width=width,
                **guided,
                **self.arguments(len(prompts)),
            ).images
        self.wait()
        ended, moments = self.clock(), self._moments
        return Painted(
            images=images,
            text_encoding_s=moments["encoded"] - began,
            denoising_s=moments["denoised"] - moments["encoded"],
            decoding_s=moments["decoded"] - moments["denoised"],
            conversion_s=ended - moments["decoded"],
        )

    def guidance(self, scale: float | None) -> float | None:
        """Guidance scale of a job; None: the pipeline's default."""
        usual = USUAL_GUIDANCE if denoiser_name(self.pipeline) == DENOISERS[0] else None
        return usual if scale is None else scale

    def wait(self) -> None:
        """Wait for the card."""
        self.device.mark_step()
        self.device.synchronize()

    def _in_clock(self, owner: Any, name: str, *, before: str = "", after: str) -> None:
        """Record the synchronized times before and after a method."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.wait()
                self._moments.setdefault(before, self.clock())
            output = method(*args, **kwargs)
            self.wait()
            self._moments[after] = self.clock()
            return output

        setattr(owner, name, timed)


def own_side(pipeline: Any) -> int:
    """Default side of a pipeline's images in pixels."""
    config = getattr(pipeline, denoiser_name(pipeline)).config
    size = getattr(pipeline, "default_sample_size", None) or config.sample_size
    return (size if isinstance(size, int) else size[0]) * int(pipeline.vae_scale_factor)


def drawn_by(prepare_latents: Callable[..., Any], seeds: Sequence[int]) -> Callable[..., Any]:
    """Wrap ``prepare_latents`` to draw each image's latents on the CPU from its own seed, in fp32,
    since other types draw other numbers. ``seeds`` are read at each call."""
    import torch

    signature = inspect.signature(prepare_latents)

    def prepare(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        dtype = bound.arguments["dtype"]
        bound.arguments["dtype"] = torch.float32
        bound.arguments["generator"] = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        latents = prepare_latents(*bound.args, **bound.kwargs)
        if isinstance(latents, tuple):  # latents and their positions
            return tuple(part.to(dtype) for part in latents)
        return latents.to(dtype)

    return prepare


def modules_of(pipeline: Any) -> dict[str, Any]:
    """The parts of a pipeline that have weights, by name."""
    import torch

    parts = pipeline.components.items()
    return {name: part for name, part in parts if isinstance(part, torch.nn.Module)}


def joined_weights(denoiser: ModelWeights, others: ModelWeights, detail: str) -> ModelWeights:
    """The weights of a denoiser and of the parts beside it."""
    count = denoiser.parameter_count + others.parameter_count
    return ModelWeights(
        weight_bytes=denoiser.weight_bytes + others.weight_bytes,
        parameter_count=count,
        quantized_share=denoiser.quantized_share * denoiser.parameter_count / count,
        detail=detail,
    )


def weights_of(pipeline: Any, precision: str, device: str, engine: str) -> ModelWeights:
    """Inspect the weights of all parts, BadConfiguration if they are in another format; in 8 bits
    only the denoiser's linear layers, the rest bf16."""
    import torch

    parts = modules_of(pipeline)
    if not precisions.quantized(precision):
        return precisions.inspect(torch.nn.ModuleDict(parts), precision, device)
    denoiser = precisions.inspect(parts.pop(denoiser_name(pipeline)), precision, device, engine)
    others = precisions.inspect(torch.nn.ModuleDict(parts), "bf16", device)
    means = precisions.support(precision, device, engine).means
    weights = joined_weights(denoiser, others, means)
    share = f"{weights.quantized_share:.0%} of the parameters, the rest in bf16"
    return replace(weights, detail=f"{means}; {share}")
