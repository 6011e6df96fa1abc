"""Calibrations: measurements of a model that an engine makes before jobs run in a precision.

A plan adds such jobs by itself, in front of those that need them (``EngineSpec.calibrations``).
"""

from __future__ import annotations

from workloads.base import JobContext, Request, Result, Workload
from workloads.engines import engine_function


def run(request: Request, context: JobContext) -> Result:
    """Calibrate; see ``workloads.base.Workload``."""
    calibrate: Workload = engine_function(request.engine, "calibrate", context.device.name)
    return calibrate(request, context)
