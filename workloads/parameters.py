"""The base of the parameters of workloads and techniques: pydantic models, checked by the plan.

Grid files, `nightgrid schema` and the documentation take names, defaults, limits and descriptions
from them. Unknown names are refused. This module imports neither torch nor Ray.
"""

from __future__ import annotations

from workloads.settings import Settings, setting


class WorkloadParameters(Settings):
    """Base of the parameters of all workloads (``workloads/settings.py``)."""

    threads: int | None = setting(
        None,
        role="choice",
        ge=1,
        le=4096,
        description="Threads that each of the job's processes computes with on its host's "
        "processor. Left out: an even share of the host's cores among its cards, on a CPU card of "
        "all cores but one.",
    )


#: Of text generation, and of checks of what an engine writes.
ADAPTER = setting(
    None,
    role="work",
    loads=True,
    consumes="adapter",
    always_in_id=True,
    min_length=1,
    description="A trained adapter to put on the model, not merged: the name that a "
    "fine-tuning job gave it (save_adapter), or a directory in peft's layout.",
)
