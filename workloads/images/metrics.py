"""Figures of text-to-image: the time of a card for an image, and what it is spent on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from workloads.base import Metric, Timed

if TYPE_CHECKING:
    from workloads.base import Sample


def _per_image(timed: Timed) -> float | None:
    images = sum(sample.items for sample in timed.samples)
    wall_s = math.fsum(sample.wall_s for sample in timed.samples)
    return wall_s / images if images else None


def _share(part: Callable[[Sample], float | None]) -> Callable[[Timed], float | None]:
    def figure(timed: Timed) -> float | None:
        told = [(part(sample), sample.wall_s) for sample in timed.samples]
        known = [(seconds, wall_s) for seconds, wall_s in told if seconds is not None]
        wall_s = math.fsum(wall_s for _, wall_s in known)
        return math.fsum(seconds for seconds, _ in known) / wall_s if wall_s > 0 else None

    return figure


METRICS = (
    Metric(
        name="seconds_per_image",
        title="per image",
        unit="s",
        description="Timed seconds over images, of each card: the inverse of a card's throughput "
        "at this batch size, not the wait for one image.",
        better="lower",
        figure=_per_image,
    ),
    Metric(
        name="text_encoding_share",
        title="text encoding",
        description="Share of the timed part in which texts were encoded.",
        figure=_share(lambda sample: sample.text_encoding_s),
    ),
    Metric(
        name="denoising_share",
        title="denoising",
        description="Share of the timed part in which noise was removed from latents.",
        figure=_share(lambda sample: sample.denoising_s),
    ),
    Metric(
        name="decoding_share",
        title="decoding",
        description="Share of the timed part in which latents were decoded to pixels.",
        figure=_share(lambda sample: sample.decoding_s),
    ),
    Metric(
        name="conversion_share",
        title="conversion",
        description="Share of the timed part in which pixels became images of the host.",
        figure=_share(lambda sample: sample.conversion_s),
    ),
)
