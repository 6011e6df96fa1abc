"""Load a text-to-image pipeline as diffusers has it: the task's ``load``.

The safety checker stays away: it would look at every image after its decoding, and nobody counts
it. Progress bars and warnings stay away too, since a worker's log is no terminal.
"""

from __future__ import annotations

from typing import Any

from workloads.base import BadConfiguration, DataMissing
from workloads.images.facts import DENOISERS
from workloads.images.rules import OWN_SCHEDULER
from workloads.models.loading import ModelSource

#: diffusers' class of each scheduler that a job may ask for.
SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "dpm-solver": "DPMSolverMultistepScheduler",
}
#: With a U-Net, where a job names none: that of the source of all comparisons.
USUAL_SCHEDULER = "ddim"


def load_pipeline(source: ModelSource, *, kind: Any = None, **arguments: Any) -> Any:
    """The pipeline with its weights, on the host.

    Args:
        source: the model.
        kind: the class to load it by; None: diffusers' own of its text-to-image pipelines.
        arguments: of ``from_pretrained``.

    Raises:
        DataMissing: a part is missing, or cannot be read.
        BadConfiguration: it makes no images from texts.
    """
    import diffusers

    quiet()
    chosen = diffusers.AutoPipelineForText2Image if kind is None else kind
    try:
        pipeline = chosen.from_pretrained(
            source.path, trust_remote_code=False, **_without_checker(source), **arguments
        )
    except OSError as error:
        raise DataMissing(f"cannot load the pipeline in {source.path}: {error}") from error
    except ValueError as error:
        if "AutoPipeline can't find a pipeline" not in str(error):
            raise
        raise BadConfiguration(
            f"{source.entry.name} is a {source.entry.architecture}, which diffusers does not know "
            "as a pipeline that makes images from texts"
        ) from error
    if denoiser_name(pipeline) == "":
        raise BadConfiguration(f"{type(pipeline).__name__} has neither U-Net nor transformer")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _without_checker(source: ModelSource) -> dict[str, Any]:
    from workloads.models.catalog import pipeline_index

    index = pipeline_index(source.path) or {}
    if "safety_checker" not in index:
        return {}
    return {"safety_checker": None, "requires_safety_checker": False}


def quiet() -> None:
    """Keep diffusers' and transformers' warnings and bars out of the log."""
    import diffusers
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers.utils.logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def denoiser_name(pipeline: Any) -> str:
    """Name of the part that removes noise; "" where there is none of a known one."""
    return next((part for part in DENOISERS if getattr(pipeline, part, None) is not None), "")


def set_scheduler(pipeline: Any, asked: str | None, classes: Any, prefix: str = "") -> str:
    """Give the pipeline the scheduler of a job, with the settings of its own; the class's name.

    Args:
        pipeline: whose scheduler is replaced.
        asked: as in the job's settings.
        classes: the module that has the classes.
        prefix: before their names.
    """
    wanted = asked or (USUAL_SCHEDULER if denoiser_name(pipeline) == DENOISERS[0] else "")
    if wanted and wanted != OWN_SCHEDULER:
        kind = getattr(classes, prefix + SCHEDULERS[wanted])
        if type(pipeline.scheduler) is not kind:
            pipeline.scheduler = kind.from_config(pipeline.scheduler.config)
    return type(pipeline.scheduler).__name__
