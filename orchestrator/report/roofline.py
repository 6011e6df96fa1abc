"""The roofline: how close to what the card could do at best.

Every decoding step must read all weights, whatever the batch size, so weight bytes over the time
of a step is a lower bound of the memory traffic, and its share of the card's bandwidth says how
near the limit decoding is. The operations that the tokens need (two for each parameter and token,
in training what the workload counted) over the card's published peak are its share of compute
(MFU); that of prefill stands apart, since reading prompts is bound by arithmetic. With a small
batch bandwidth limits, with a large one compute: the ridge between them is the intensity,
operations per byte, at which the two limits meet. Emulated cards have no peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.reference_data import DeviceSheet
from orchestrator.report.reported import figure_of
from workloads.bench.metrics import PREFILL_TOKENS_PER_S as PREFILL
from workloads.devices import all_devices

#: The arithmetic that a precision computes in. Weights in int8 or int4 are unpacked to bf16 first.
ARITHMETIC = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "bf16",
    "int8": "bf16",
    "int4": "bf16",
    "fp8": "fp8",
}
#: That of fp32 products in fewer bits, by PyTorch's word for it.
_FEWER_BITS = {"high": "tf32", "medium": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One row against its card's data sheet; None where a figure is missing."""

    row: Measurement
    sheet: DeviceSheet
    bandwidth: float | None  # share of the peak, 0 to 1: a lower bound
    compute: float | None
    prefill: float | None  # of compute, while prompts are read (MFU)
    arithmetic: str  # "bf16", "fp8", …, or ""
    intensity: float | None  # operations per byte of weights, of one decoding step
    flops_per_s: float | None  # of one card


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """All rows that could be held against a data sheet, and why others could not."""

    shares: tuple[Share, ...] = ()
    emulated: int = 0  # succeeded rows on emulated cards
    unknown: tuple[str, ...] = ()  # real devices without a data sheet


def roofline_of(rows: Sequence[Measurement], sheets: Sequence[DeviceSheet]) -> Roofline:
    """Each succeeded row on a real card with a data sheet."""
    shares, unknown, emulated = [], [], 0
    for row in rows:
        if row.state is not State.SUCCEEDED:
            continue
        if row.emulated:
            emulated += 1
            continue
        sheet = sheet_of(row.device_name or "", sheets)
        if sheet is None:
            unknown.append(row.device_name or "no device name")
            continue
        share = share_of(row, sheet)
        if share.bandwidth is not None or share.compute is not None:
            shares.append(share)
    return Roofline(shares=tuple(shares), emulated=emulated, unknown=tuple(dict.fromkeys(unknown)))


def sheet_of(device_name: str, sheets: Sequence[DeviceSheet]) -> DeviceSheet | None:
    """The data sheet of a card that the driver calls so; None if it is not exactly that card."""
    named = next(filter(None, (spec.product(device_name) for spec in all_devices())), None)
    return next((sheet for sheet in sheets if sheet.device == named), None)


def share_of(row: Measurement, sheet: DeviceSheet) -> Share:
    """One row, which ran on ``sheet``'s card, against its peaks."""
    metrics = row.metrics
    step_s = metrics.tpot_p50_s if metrics.tpot_p50_s and metrics.tpot_p50_s > 0 else None
    bandwidth = None
    if step_s and row.weight_bytes and sheet.bandwidth_bytes_per_s:
        bandwidth = row.weight_bytes / step_s / sheet.bandwidth_bytes_per_s
    arithmetic = arithmetic_of(row)
    peak = sheet.flops.get(arithmetic)
    operations, prefill = _operations_per_s(row), _prefill_flops_per_s(row)
    intensity = None
    if step_s and row.weight_bytes and row.parameter_count and row.batch_size:
        intensity = 2 * row.parameter_count * row.batch_size / row.weight_bytes
    return Share(
        row=row,
        sheet=sheet,
        bandwidth=bandwidth,
        compute=operations / peak if operations and peak else None,
        prefill=prefill / peak if prefill and peak else None,
        arithmetic=arithmetic if peak else "",
        intensity=intensity,
        flops_per_s=operations,
    )


def arithmetic_of(row: Measurement) -> str:
    """The arithmetic of a row's matrix products, as data sheets name it; "" if that is unknown."""
    autocast = row.parameters.get("autocast")
    precision = autocast if isinstance(autocast, str) and autocast in ARITHMETIC else row.precision
    kind = ARITHMETIC.get(precision, "")
    if kind == "fp32":
        return _FEWER_BITS.get(str(row.parameters.get("matmul_precision")), kind)
    return kind


def _prefill_flops_per_s(row: Measurement) -> float | None:
    """Operations that the prompts' real tokens needed while they were read, per second and card."""
    rate = figure_of(row, PREFILL.name, {PREFILL.name: PREFILL})
    return 2.0 * row.parameter_count * rate if rate and row.parameter_count else None


def _operations_per_s(row: Measurement) -> float | None:
    """Operations that the real tokens needed, per second and card; padding is not counted."""
    tokens = row.metrics.total_tokens_per_s
    if not tokens:
        return None
    per_token = row.train_flops_per_token
    if per_token is None and row.metrics.generated_tokens_per_s and row.parameter_count:
        per_token = 2.0 * row.parameter_count
    return tokens * per_token / row.cards if per_token else None
