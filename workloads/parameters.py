"""The base of the parameters of workloads and techniques: pydantic models, checked by the plan.

Grid files, `nightgrid schema` and the documentation take names, defaults, limits and descriptions
from them. Unknown names are refused. This module imports neither torch nor Ray.
"""

from __future__ import annotations

from workloads.settings import Settings


class WorkloadParameters(Settings):
    """Base of the parameters of all workloads (``workloads/settings.py``)."""
