"""Speed and memory against the data sheet of the card, or against what a processor's core can do.

A card without a data sheet has no limits here, and an emulated one is a processor.
"""

from __future__ import annotations

from functools import lru_cache

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.possible.recount import Check, RawCheck, Recount
from orchestrator.report.reference_data import DeviceSheet, reference
from orchestrator.report.roofline import arithmetic_of, sheet_of
from orchestrator.report.units import number, percent, seconds, size

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


def most_tokens_per_s(row: Measurement) -> tuple[float, str] | None:
    """Tokens, or positions, that a card can work on in a second, and the peak that says so."""
    sheet, per_token = sheet_for(row), _per_token(row)
    peak = _peak(row, sheet) if sheet is not None and per_token else None
    if sheet is None or peak is None or not per_token:
        return None
    kind, flops = peak
    words = f"the {kind} peak of {sheet.device}, {number(flops / 1e12)} TFLOP/s"
    return MOST * flops / per_token, words


def least_step_s(row: Measurement) -> float | None:
    """The time that reading all weights takes, as each decoding step and each first token does."""
    sheet, weights = sheet_for(row), row.weight_bytes
    if sheet is None or not sheet.bandwidth_bytes_per_s or not weights or weights < CACHED_BYTES:
        return None
    return weights / sheet.bandwidth_bytes_per_s / MOST


def most_decoded_per_core_s(row: Measurement) -> float | None:
    """Tokens that a core of a processor can decode in a second; None for a card's row."""
    if not (row.emulated or row.peak_device_memory_bytes is None) or not row.parameter_count:
        return None
    if not row.metrics.generated_tokens_per_s:
        return None
    return CORE_FLOPS.get(row.precision, CORE_FLOPS[""]) / (2.0 * row.parameter_count)


def longest_text(row: Measurement) -> int | None:
    """The decoding steps of a batch at least, where the job fixed them."""
    longest = row.parameters.get("output_tokens")
    return longest if row.parameters.get("ignore_eos") is True and type(longest) is int else None


def _operations(row: Measurement) -> str | None:
    limit, rate = most_tokens_per_s(row), row.metrics.total_tokens_per_s
    return None if limit is None or rate is None else _too_many(rate / row.cards, limit)


def _positions(row: Measurement, raw: Recount) -> str | None:
    limit = most_tokens_per_s(row)
    rates = (s.computed_tokens / s.wall_s / row.cards for s in raw.timed if s.wall_s > 0)
    return None if limit is None else _too_many(max(rates, default=0.0), limit)


def _too_many(rate: float, limit: tuple[float, str]) -> str | None:
    most, peak = limit
    if rate <= most:
        return None
    share = percent(MOST * rate / most, 3)
    return f"{number(rate)} tokens/s a card, padding included, are {share} of {peak}"


def _core_operations(row: Measurement, raw: Recount) -> str | None:
    """Decoding on a processor, where no more cores than threads work."""
    most = most_decoded_per_core_s(row)
    for sample in raw.timed if most is not None else ():
        cores_s = max(sample.cpu_s, sample.wall_s * (row.threads or 1))
        if most is not None and sample.output_tokens > most * cores_s:
            rate = number(sample.output_tokens / cores_s) if cores_s else "any"
            return (
                f"a core decoded {rate} tokens/s; {number(most)} take all that a core can do in "
                f"{row.precision}"
            )
    return None


def _bandwidth(row: Measurement) -> str | None:
    least_s = least_step_s(row)
    known = {"a decoding step": row.metrics.tpot_p50_s, "a first token": row.metrics.ttft_s}
    for name, took_s in known.items():
        if least_s is not None and took_s is not None and took_s < least_s:
            return (
                f"{name} took {seconds(took_s)}; reading {size(row.weight_bytes)} of weights takes "
                f"{seconds(least_s)} on {row.device_name}"
            )
    return None


def _text_bandwidth(row: Measurement, raw: Recount) -> str | None:
    """Each token of a text is a step of its own at least, also where no step was told."""
    least_s, longest = least_step_s(row), longest_text(row)
    if least_s is None or longest is None:
        return None
    for sample in raw.timed:
        if sample.output_tokens and sample.wall_s < least_s * longest:
            return (
                f"{longest} tokens of a text took {seconds(sample.wall_s)}; reading "
                f"{size(row.weight_bytes)} of weights for each takes {seconds(least_s * longest)}"
            )
    return None


def _prefill(row: Measurement, raw: Recount) -> str | None:
    """The operations of reading a prompt, before its first token."""
    limit = most_tokens_per_s(row)
    for item in raw.items if limit is not None else ():
        if limit is not None and item.ttft_s is not None:
            most = limit[0] * row.cards
            if item.input_tokens > most * item.ttft_s:
                return (
                    f"a prompt of {item.input_tokens} tokens was read in {seconds(item.ttft_s)}; "
                    f"at {limit[1]}, that takes {seconds(item.input_tokens / most)}"
                )
    return None


def _memory(row: Measurement) -> str | None:
    sheet, peak = sheet_for(row), row.peak_device_memory_bytes
    if sheet is None or sheet.memory_gb is None or peak is None:
        return None
    has = sheet.memory_gb * 2**30  # the largest that a maker's GB may mean
    if peak <= has:
        return None
    return f"{size(peak)} were allocated on a card that has {size(has)}"


def _weights(row: Measurement) -> str | None:
    if not row.weight_bytes or not row.parameter_count:
        return None
    each = row.weight_bytes / row.parameter_count
    low, high = BYTES_PER_PARAMETER
    if low / row.cards <= each <= high:  # a gang may share them out
        return None
    return f"{size(row.weight_bytes)} for {row.parameter_count:,} parameters, {number(each)} B each"


CHECKS: tuple[Check, ...] = (_operations, _bandwidth, _memory, _weights)
RAW_CHECKS: tuple[RawCheck, ...] = (_positions, _core_operations, _text_bandwidth, _prefill)
