"""Text to image beside diffusers' own pipeline, called as its example calls it.

The same parts, texts and latents: DDIM, guidance 7.5, each image's latents from a generator of its
own. The first image must be the same to the pixel, which is told. The embedded pipeline has random
weights, so what is compared is the time around the library's work and how its tensors lie.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from benchmarks.figures import Goal, Line, cpu_ratio, rates
from benchmarks.setting import MANY, Setting, Takes

TITLE = "Text to image, 50 DDIM steps, guidance 7.5"
TAKES_S = Takes(whole=380, quick=22)
MODEL = "tiny-stable-diffusion"
#: Ours: name, and what it asks for.
OURS: dict[str, dict[str, Any]] = {"as it is": {}, "channels last": {"channels_last": True}}


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.data.embedded import IMAGE_PROMPTS
    from workloads.models.loading import open_model

    steps, images = setting.sized((50, 4), (20, 4), (2, 2))
    source = open_model(MODEL)
    texts = setting.scratch / "texts.json"
    texts.write_text(json.dumps(IMAGE_PROMPTS))
    lines: list[Line] = []
    facts: dict[str, Any] = {"model": MODEL, "steps": steps, "images of a turn": images}
    for size in setting.sized((1, 4), (4,), (2,)):
        with contextlib.ExitStack() as stack:
            peer = setting.started(
                stack,
                f"diffusers, batches of {size}",
                setting.peer,
                "images_peer.py",
                *(source.path, texts, steps, size, images // size),
            )
            ours = [
                setting.started(
                    stack,
                    f"nightgrid {name}, batches of {size}",
                    sys.executable,
                    "images_nightgrid.py",
                    *(MODEL, steps, size, images // size, json.dumps(asked)),
                )
                for name, asked in OURS.items()
            ]
            often = max(MANY, setting.turns)
            turns = dict(setting.turns_of([*ours, peer], warm_ups=1, turns=often))
        told = [each for found in turns.values() for each in found]
        facts["threads of each"] = sorted({each["threads"] for each in told})
        theirs = turns.pop(peer.name)
        for mine, asked in zip(turns.values(), OURS.values(), strict=True):
            lines.append(
                Line(
                    what=f"images/s, batches of {size}" + (", channels last" if asked else ""),
                    against="StableDiffusionPipeline",
                    unit="images/s",
                    ours=rates(mine),
                    theirs=rates(theirs),
                    goal=Goal() if asked else Goal(kind="at least", value=1.0),
                    cpu_ratio=cpu_ratio(mine, theirs),
                    note=_agreement(mine[0]["first"], theirs[0]["first"]),
                )
            )
    return lines, facts


def _agreement(mine: list[int], theirs: list[int]) -> str:
    """Distance of two first images, value by value."""
    far = [abs(one - other) for one, other in zip(mine, theirs, strict=True)]
    if not any(far):
        return "first images equal"
    return f"first images differ by {max(far)} of 255 at most, {sum(far) / len(far):.4f} on average"
