"""Speed and memory against the data sheet of the card, or against what a processor's core can do.

A card without a data sheet has no limits here, and an emulated one is a processor.
"""

from __future__ import annotations

from functools import lru_cache

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.possible.recount import Check, Recount
from orchestrator.report.reference_data import DeviceSheet, reference
from orchestrator.report.roofline import arithmetic_of, sheet_of
from orchestrator.report.units import number, percent, seconds, size
from workloads.api import Sample

#: Shares of a data sheet's limits above which nothing is believed; its figures are rounded.
MOST = 1.02
#: Weights of less than this may stay in a card's caches.
CACHED_BYTES = 512 * 2**20
#: Bytes that a parameter takes at least and at most, scales and unquantised layers included.
BYTES_PER_PARAMETER = (0.25, 8.5)
#: Operations that no core of a processor exceeds in a second: in fp32 two AVX-512 units, in fewer
#: bits matrix units (AMX). A model's input embeddings take no operations, hence twice as many.
CORE_FLOPS = {"fp32": 2 * 3e11, "": 2 * 1.5e13}


def sheet_for(row: Measurement) -> DeviceSheet | None:
    """The data sheet of the row's card; None where it is emulated, or no sheet is known."""
    return None if row.emulated or not row.device_name else _sheet(row.device_name)


@lru_cache(maxsize=256)
def _sheet(device_name: str) -> DeviceSheet | None:
    return sheet_of(device_name, reference().devices)


def _per_token(row: Measurement) -> float | None:
    """Operations that a token needs at least; None where that is not known."""
    if row.train_flops_per_token is not None:
        return row.train_flops_per_token
    if row.metrics.generated_tokens_per_s and row.parameter_count:
        return 2.0 * row.parameter_count
    return None


def _peak(row: Measurement, sheet: DeviceSheet) -> tuple[str, float] | None:
    """The arithmetic of a row and its peak; of one that the sheet lacks the fastest it has."""
    known = sheet.flops
    if not known:
        return None
    kind = arithmetic_of(row)
    if row.precision == "int8":  # some libraries multiply int8, others unpack to bf16
        kind = "int8"
    if kind not in known:
        kind = max(known, key=known.__getitem__)
    return kind, known[kind]


def _operations(row: Measurement, raw: Recount | None) -> str | None:
    sheet, per_token = sheet_for(row), _per_token(row)
    peak = _peak(row, sheet) if sheet is not None else None
    if sheet is None or per_token is None or peak is None:
        return None
    rates = [(row.metrics.total_tokens_per_s or 0.0) / row.cards]
    rates += [s.computed_tokens / s.wall_s / row.cards for s in _timed(raw) if s.wall_s > 0]
    share = max(rates) * per_token / peak[1]
    if share <= MOST:
        return None
    flops = number(max(rates) * per_token / 1e12)
    return (
        f"it did {flops} TFLOP/s a card, {percent(share, 3)} of the {peak[0]} peak of "
        f"{sheet.device}, {number(peak[1] / 1e12)} TFLOP/s"
    )


def _core_operations(row: Measurement, raw: Recount | None) -> str | None:
    """Decoding on a processor, where no more cores than threads work."""
    if not (row.emulated or row.peak_device_memory_bytes is None) or not row.parameter_count:
        return None
    if raw is None or not row.metrics.generated_tokens_per_s:
        return None
    limit = CORE_FLOPS.get(row.precision, CORE_FLOPS[""])
    for sample in raw.timed:
        cores_s = max(sample.cpu_s, sample.wall_s * (row.threads or 1))
        done = 2.0 * row.parameter_count * sample.output_tokens
        if done > limit * cores_s:
            rate, most = number(done / cores_s / 1e9), number(limit / 1e9)
            return f"a core did {rate} GFLOP/s; none does more than {most} in {row.precision}"
    return None


def _bandwidth(row: Measurement, raw: Recount | None) -> str | None:
    """Each decoding step, and the reading of a prompt, takes all weights from memory once."""
    sheet, weights = sheet_for(row), row.weight_bytes
    if sheet is None or sheet.bandwidth_bytes_per_s is None or not weights:
        return None
    if weights < CACHED_BYTES:
        return None
    least_s = weights / sheet.bandwidth_bytes_per_s / MOST
    known = {"a decoding step": row.metrics.tpot_p50_s, "a first token": row.metrics.ttft_s}
    for name, took_s in known.items():
        if took_s is not None and took_s < least_s:
            return (
                f"{name} took {seconds(took_s)}; reading {size(weights)} of weights takes "
                f"{seconds(least_s)} on {sheet.device}"
            )
    # A job that tells of no step: each token of a text is a step of its own at least.
    longest = row.parameters.get("output_tokens")
    if row.parameters.get("ignore_eos") is True and isinstance(longest, int):
        for sample in _timed(raw):
            if sample.output_tokens and sample.wall_s < least_s * longest:
                return (
                    f"{longest} tokens of a text took {seconds(sample.wall_s)}; reading "
                    f"{size(weights)} of weights for each takes {seconds(least_s * longest)}"
                )
    return None


def _prefill(row: Measurement, raw: Recount | None) -> str | None:
    """The operations of reading prompts, before their first token."""
    sheet, per_token = sheet_for(row), _per_token(row)
    peak = _peak(row, sheet) if sheet is not None else None
    if sheet is None or per_token is None or peak is None or row.train_flops_per_token is not None:
        return None
    for item in raw.items if raw is not None else ():
        if item.ttft_s is not None:
            done = item.input_tokens * per_token / row.cards
            if done > MOST * peak[1] * item.ttft_s:
                return (
                    f"a prompt of {item.input_tokens} tokens was read in {seconds(item.ttft_s)}; "
                    f"at the {peak[0]} peak of {sheet.device} that takes {seconds(done / peak[1])}"
                )
    return None


def _memory(row: Measurement, _: Recount | None) -> str | None:
    sheet, peak = sheet_for(row), row.peak_device_memory_bytes
    if sheet is None or sheet.memory_gb is None or peak is None:
        return None
    has = sheet.memory_gb * 2**30  # the largest that a maker's GB may mean
    if peak <= has:
        return None
    return f"{size(peak)} were allocated on a card that has {size(has)}"


def _weights(row: Measurement, _: Recount | None) -> str | None:
    if not row.weight_bytes or not row.parameter_count:
        return None
    each = row.weight_bytes / row.parameter_count
    low, high = BYTES_PER_PARAMETER
    if low / row.cards <= each <= high:  # a gang may share them out
        return None
    return f"{size(row.weight_bytes)} for {row.parameter_count:,} parameters, {number(each)} B each"


def _timed(raw: Recount | None) -> tuple[Sample, ...]:
    return raw.timed if raw is not None else ()


CHECKS: tuple[Check, ...] = (
    _operations,
    _core_operations,
    _bandwidth,
    _prefill,
    _memory,
    _weights,
)
