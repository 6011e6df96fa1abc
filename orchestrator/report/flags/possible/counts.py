"""Tokens and prompts, recounted from the prompts, ids and texts that a row keeps."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.possible.recount import Check, RawCheck, Recount
from orchestrator.report.units import plural
from workloads.api import END_TOKEN_IDS

#: No vocabulary has a longer token, in bytes of UTF-8; runs of spaces are the longest.
LONGEST_TOKEN = 256


def _prompts(_: Measurement, raw: Recount) -> str | None:
    if not raw.items:
        return None
    pairs = (
        ("prompts", len(raw.items), sum(sample.items for sample in raw.last)),
        (
            "input tokens",
            sum(item.input_tokens for item in raw.items),
            sum(sample.input_tokens for sample in raw.last),
        ),
        (
            "generated tokens",
            sum(item.output_tokens for item in raw.items),
            sum(sample.output_tokens for sample in raw.last),
        ),
    )
    for name, found, said in pairs:
        if found != said:
            return f"its last repeat counts {said:,} {name}, its prompts have {found:,}"
    return None


def asked_lengths(row: Measurement) -> tuple[int | None, bool, int | None]:
    """Tokens that each prompt generates at most, whether it is exactly so many, and tokens that it
    has; None where the job does not fix them."""
    most, read = row.parameters.get("output_tokens"), row.parameters.get("input_tokens")
    exact = row.parameters.get("ignore_eos") is True
    return most if type(most) is int else None, exact, read if type(read) is int else None


def _lengths(row: Measurement, raw: Recount) -> str | None:
    most, exact, read = asked_lengths(row)
    for sample in raw.timed:
        of = plural(sample.items, "prompt")
        if most is not None and sample.output_tokens:
            limit = sample.items * most
            if sample.output_tokens > limit or (exact and sample.output_tokens != limit):
                return f"a batch generated {sample.output_tokens:,} tokens for {of} of {most} each"
        if read is not None and sample.output_tokens and sample.input_tokens != sample.items * read:
            return f"a batch read {sample.input_tokens:,} tokens of {of} with {read} each"
    for item in raw.items:
        written = item.output_tokens
        if most is not None and (written > most or (exact and written != most)):
            return f"a prompt generated {written:,} tokens where {most} were asked for"
        if read is not None and item.input_tokens != read:
            return f"a prompt has {item.input_tokens:,} tokens where {read} were asked for"
    return None


def _texts(_: Measurement, raw: Recount) -> str | None:
    for item in raw.items:
        if item.output_text is not None:
            size = len(item.output_text.encode("utf-8", "replace"))
            if size > LONGEST_TOKEN * item.output_tokens:
                return f"a text of {size:,} bytes counts as {plural(item.output_tokens, 'token')}"
    return None


def ends_of(row: Measurement) -> frozenset[int]:
    """The ids of which the first ends a text; none where the row does not say, or where texts go
    on past them."""
    told = row.details.get(END_TOKEN_IDS, "").split()
    return frozenset(int(one) for one in told if one.isdecimal())


def _ids(row: Measurement, raw: Recount) -> str | None:
    """The tokens of a kept text, counted from its ids: all up to the first that ends it."""
    ends = ends_of(row)
    for item in raw.items:
        ids = item.output_ids
        if ids is None:
            continue
        said = f"a text counts as {plural(item.output_tokens, 'token')}"
        if len(ids) != item.output_tokens:
            return f"{said}, and has {len(ids):,} ids"
        ended = next((n for n, token in enumerate(ids, 1) if token in ends), len(ids))
        if ended < len(ids):
            return f"{said}, and ended after {ended:,}"
    return None


def _positions(_: Measurement, raw: Recount) -> str | None:
    """The device works on every real token but the last of each text, and on padding."""
    for sample in raw.timed:
        real = sample.input_tokens + max(0, sample.output_tokens - sample.items)
        if sample.computed_tokens and real > sample.computed_tokens:
            return (
                f"a batch has {real:,} tokens to work on, and the device worked on "
                f"{sample.computed_tokens:,}"
            )
    return None


def _batches(row: Measurement) -> str | None:
    asked = row.batch_size_requested
    if not asked.isdecimal() or row.batch_size in (None, int(asked)):
        return None
    return f"batch_size is {row.batch_size}, {asked} was asked for"


CHECKS: tuple[Check, ...] = (_batches,)
RAW_CHECKS: tuple[RawCheck, ...] = (_prompts, _lengths, _texts, _ids, _positions)
