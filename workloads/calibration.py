"""What a precision has to know of a model before jobs can run in it: an engine measures that.

A plan adds such jobs by itself, in front of those that need them (``EngineSpec.calibrations``).
"""

from __future__ import annotations

from workloads.api import JobContext, Request, Result, Workload
from workloads.engines import engine_function


def run(request: Request, context: JobContext) -> Result:
    """Calibrate; see ``workloads.api.Workload``."""
    calibrate: Workload = engine_function(request.engine, "calibrate", context.device.name)
    return calibrate(request, context)
