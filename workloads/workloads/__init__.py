"""Workloads: what a grid may ask for. Each file here declares one (``base.py``).

To add one, write ``NAME.py`` with its ``SPEC``, or name a spec of another installed package under
the entry points ``nightgrid.workloads`` (docs/adding-a-workload.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from workloads.declared import Declared
from workloads.workloads.base import WorkloadSpec

#: Every workload that a grid may name.
WORKLOADS: Mapping[str, WorkloadSpec] = Declared(__name__, WorkloadSpec, "nightgrid.workloads")
