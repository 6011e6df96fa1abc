"""Facts about a text-to-image pipeline, from the JSON files in its directories: nothing is loaded.

Rules read them in the plan, and a job before it loads. Of a pipeline that lies on a hub its index
alone is known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import WorkloadError
from workloads.models.catalog import directory_of, pipeline_index
from workloads.util import files

#: Parts that remove noise step by step: one of them is in every pipeline.
DENOISERS = ("unet", "transformer")
#: Schedulers of flow matching know no other's noise; their names begin so.
_FLOW = "FlowMatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts:
    """The parts of a pipeline."""

    class_name: str
    denoiser: str  # the part's name; "": none of a known one
    reads_text: bool
    scheduler: str  # class of its own scheduler
    guided: bool  # whether a guidance scale means something to it; unknown counts as yes

    @property
    def flow_matching(self) -> bool:
        """Tell if it was trained for flow matching, which other schedulers do not do."""
        return self.scheduler.startswith(_FLOW)


def facts_of(model: str) -> PipelineFacts | None:
    """The facts of a pipeline by the model's name; None where they cannot be told here."""
    try:
        index = pipeline_index(model)
    except (WorkloadError, OSError):
        return None  # whoever looks for the model says so
    return None if index is None else _facts(index, directory_of(model))


def _facts(index: Mapping[str, Any], directory: Path | None) -> PipelineFacts:
    denoiser = next((part for part in DENOISERS if _class_of(index, part)), "")
    config = _config(directory, denoiser) if directory is not None and denoiser else {}
    return PipelineFacts(
        class_name=str(index.get("_class_name") or "unknown"),
        denoiser=denoiser,
        reads_text=bool(_class_of(index, "text_encoder")),
        scheduler=_class_of(index, "scheduler"),
        guided=config.get("guidance_embeds") is not False,
    )


def _class_of(index: Mapping[str, Any], part: str) -> str:
    """The class of a part; "" where the pipeline lacks it."""
    said = index.get(part)
    return str(said[-1] or "") if isinstance(said, list) and said else ""


def _config(directory: Path, part: str) -> Mapping[str, Any]:
    """config.json of a part; empty where it cannot be read."""
    file = directory / part / "config.json"
    try:
        found = json.loads(files.read_text(file)) if os.path.isfile(file) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
