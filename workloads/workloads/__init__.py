"""Workloads: what a grid may ask for. Each file here declares one (``base.py``).

To add one, write ``NAME.py`` with its ``SPEC``, or name a spec of another installed package under
the entry points ``nightgrid.workloads`` (docs/adding-a-workload.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from workloads.declared import Declared
from workloads.workloads.base import WorkloadSpec

#: Every workload that a grid may name.
WORKLOADS: Mapping[str, WorkloadSpec] = Declared(
    {
        "finetuning": "workloads.workloads.finetuning",
        "fp8-calibration": "workloads.workloads.fp8_calibration",
        "onnx-calibration": "workloads.workloads.onnx_calibration",
        "pretraining": "workloads.workloads.pretraining",
        "quality-reference": "workloads.workloads.quality_reference",
        "quantization": "workloads.workloads.quantization",
        "text-encoding": "workloads.workloads.text_encoding",
        "text-generation": "workloads.workloads.text_generation",
        "text-to-image": "workloads.workloads.text_to_image",
        "verification": "workloads.workloads.verification",
    },
    WorkloadSpec,
    "nightgrid.workloads",
)
