"""Profile two untimed steps with torch's profiler, which slows them, so figures are shares of time:
of kernels on a card, of operators' self time on a CPU."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.devices import host_device
from workloads.settings import neutral

if TYPE_CHECKING:
    from workloads.devices.base import Device

STEPS = 2
DEAREST = 10  # operators that a row names
#: Larger compressed traces are dropped, since they travel with the row to the driver.
MOST_TRACE_BYTES = 64 * 2**20

PROFILE = neutral(
    False,
    description="Watch two more steps with torch's profiler after the timed part. The row names "
    "the ten operators that take most time, the share of copies, bytes copied and launches a step; "
    "the trace lies beside the rows (trace-ATTEMPT.json.gz), linked from the report.",
)

#: Bytes per element, by torch's type names in traces.
_BYTES = {
    **dict.fromkeys(("double", "long int", "long", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short int", "short"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char", "char"), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator's own part of a profile, all its calls together."""

    name: str
    calls: int
    time_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The figures of a profile for the row, and its trace as gzipped JSON."""

    details: Mapping[str, str] = field(default_factory=dict)
    trace: bytes | None = None


def profiled(step: Callable[[], object], device: Device) -> Profile:
    """Watch ``STEPS`` calls of ``step``."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_card, host = not device.spec.host, host_device().torch_type.upper()
    watched = {getattr(ProfilerActivity, kind) for kind in (host, device.spec.torch_type.upper())}
    device.synchronize()
    with profile(activities=sorted(watched, key=str), record_shapes=True) as recorded:
        for _ in range(STEPS):
            step()
            device.mark_step()
            device.synchronize()
    on_host = getattr(torch.autograd.DeviceType, host)
    operators = [
        Operator(
            name=row.key,
            calls=row.count,
            time_us=row.self_device_time_total if on_card else row.self_cpu_time_total,
        )
        for row in recorded.key_averages()
        if row.device_type == on_host
    ]
    with tempfile.TemporaryDirectory() as directory:
        written = Path(directory, "trace.json")
        recorded.export_chrome_trace(str(written))
        text = written.read_bytes()
    trace = gzip.compress(text, 6)
    details = figures(operators, json.loads(text)["traceEvents"], on_card=on_card)
    details["profile_trace_bytes"] = str(len(trace))
    if len(trace) > MOST_TRACE_BYTES:
        details["profile_trace_bytes"] += f" are above {MOST_TRACE_BYTES}: the trace is left out"
        return Profile(details=details)
    return Profile(details=details, trace=trace)


def figures(
    operators: Sequence[Operator], events: Iterable[Mapping[str, Any]], *, on_card: bool
) -> dict[str, str]:
    """Details of the row, from operators and trace events."""
    called = [
        operator
        for operator in operators
        if operator.name.startswith("aten::") or operator.time_us > 0
    ]
    total_us = sum(operator.time_us for operator in called)
    if not total_us:
        return {"profile": "no operator of torch ran in this process"}
    copies_us = sum(operator.time_us for operator in called if operator.name == "aten::copy_")
    copied = launches = 0
    for event in events:
        kind, about = event.get("cat"), event.get("args", {})
        if kind == "kernel":
            launches += 1
        elif kind in ("gpu_memcpy", "gpu_memset"):
            copied += int(about.get("bytes", 0))
        elif kind == "cpu_op" and event["name"] == "aten::copy_" and not on_card:
            shapes, kinds = about.get("Input Dims", ()), about.get("Input type", ())
            if shapes and kinds:  # of the tensor that is written, and of the one that is read
                copied += math.prod(shapes[0]) * _BYTES.get(kinds[0], 0)
    if not on_card:
        launches = sum(operator.calls for operator in called)
    dearest = sorted(called, key=lambda operator: -operator.time_us)[:DEAREST]
    return {
        "profile": f"{STEPS} untimed steps, {total_us / STEPS / 1000:.4g} ms each of "
        + ("kernels" if on_card else "operators"),
        "profile_operators": "; ".join(
            f"{operator.name} {operator.time_us / total_us:.1%} "
            f"({operator.calls / STEPS:g} calls a step)"
            for operator in dearest
        ),
        "profile_copies": f"{copies_us / total_us:.1%} of the time, {copied / STEPS:.4g} bytes a "
        "step",
        "profile_launches": f"{launches / STEPS:g} {'kernels' if on_card else 'operators'} a step",
    }
