"""Figures of encoder and decoder apart, for rows of sequence-to-sequence models. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.base import Metric

if TYPE_CHECKING:
    from workloads.base import Sample

METRICS = (
    Metric(
        name="summaries_per_s",
        title="summaries",
        unit="summaries/s",
        description="Texts that were written over the time of encoder and decoder.",
        better="higher",
        ranks="sum",
    ),
    Metric(
        name="encoder_s",
        title="encoder",
        unit="s",
        description="The encoder's time for a batch, in the mean.",
        better="lower",
    ),
    Metric(
        name="decoder_s",
        title="decoder",
        unit="s",
        description="The time for a batch less the encoder's, in the mean.",
        better="lower",
    ),
)


def figures(samples: Sequence[Sample]) -> Mapping[str, float]:
    """Figures of encoder and decoder from the timed samples of one card; none where no encoder was
    timed."""
    timed = [s for s in samples if not s.warmup and s.complete and s.encoder_s is not None]
    took_s = math.fsum(sample.wall_s for sample in timed)
    if took_s <= 0:
        return {}
    encoder_s = math.fsum(sample.encoder_s or 0.0 for sample in timed)
    return {
        "summaries_per_s": sum(sample.items for sample in timed) / took_s,
        "encoder_s": encoder_s / len(timed),
        "decoder_s": (took_s - encoder_s) / len(timed),
    }
