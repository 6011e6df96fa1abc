"""The table that vendors publish: model, cards, precision, lengths, batch, tokens a second.

One line a measured row. Lengths are the fixed ones where a job fixed them, else the means of the
prompts that were measured, and ``length_kind`` says which. Columns at the end say what such a
table leaves out: whether cards were emulated, weights random or data synthetic.
"""

from __future__ import annotations

import csv
import io
import math

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.figure_data import plain
from orchestrator.report.grouping import precision_rank
from orchestrator.report.summary import Summary

COLUMNS = (
    "model",
    "device",
    "cards",
    "precision",
    "input_length",
    "output_length",
    "length_kind",
    "batch_size",
    "tokens_per_s",
    "emulated",
    "random_weights",
    "synthetic_data",
)


def to_vendor_csv(summary: Summary) -> str:
    """Every row that generated tokens, by model, device, cards, precision and batch size."""
    rows = sorted((row for row in summary.rows if _generated(row)), key=_order)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([plain(value) for value in _line(row)] for row in rows)
    return text.getvalue()


def lengths(row: Measurement) -> tuple[int | None, int | None, str]:
    """Input and output length in tokens, and whether they are ``fixed`` or a ``mean``."""
    fixed_input = row.parameters.get("input_tokens")
    fixed_output = row.parameters.get("output_tokens")
    exactly = row.parameters.get("ignore_eos") is True  # else a prompt may end by itself
    if exactly and isinstance(fixed_input, int) and isinstance(fixed_output, int):
        return fixed_input, fixed_output, "fixed"
    items = [item for _, item in row.items]
    if not items:
        return None, None, ""
    count = len(items)
    return (
        round(math.fsum(item.input_tokens for item in items) / count),
        round(math.fsum(item.output_tokens for item in items) / count),
        "mean",
    )


def _generated(row: Measurement) -> bool:
    return row.state is State.SUCCEEDED and row.metrics.generated_tokens_per_s is not None


def _order(row: Measurement) -> tuple[object, ...]:
    device, rank = row.device_name or "", precision_rank(row.precision)
    return (row.model, device, row.cards, rank, row.batch_size or 0)


def _line(row: Measurement) -> tuple[object, ...]:
    # The batch of the whole job is what vendors give; a batch of ours is per card.
    batch = row.batch_size * row.cards if row.batch_size is not None else None
    return (
        row.model,
        row.device_name or str(row.accelerator),
        row.cards,
        row.precision,
        *lengths(row),
        batch,
        row.metrics.generated_tokens_per_s,
        row.emulated,
        bool(row.random_weights),
        bool(row.synthetic_data),
    )
