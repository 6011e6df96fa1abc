"""The text of a first grid: the settings that somebody named, two axes, and what else there is.

Pure: whoever calls it has looked up what the model is and what this machine has.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence

from workloads.settings import Declaration

_WIDTH = 96
BATCH_SIZES, ONE_BATCH_SIZE = "1..16 *2          # 1, 2, 4, 8, 16", "1"


def name_of(model: str, file: str = "grid.yaml") -> str:
    """A name for a grid: that of its file, so that two files are two runs; of a file with the usual
    name, the last part of the model's path or hub id."""
    stem = re.sub(r"\.ya?ml$", "", re.split(r"[/\\]", file)[-1])
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1] if stem == "grid" else stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("._-")[:48] or "first"


def first_grid(
    fields: Mapping[str, str],
    *,
    precisions: Sequence[str],
    batch_sizes: str,
    others: Sequence[str],
    settings: Mapping[str, Declaration],
    file: str,
) -> str:
    """The file's text.

    Args:
        fields: what every job has: workload, model, dataset, accelerator.
        precisions: one axis.
        batch_sizes: the other: ``BATCH_SIZES`` or ``ONE_BATCH_SIZE``.
        others: further workloads that run this model.
        settings: those of the workload, shown with their defaults.
        file: its name, for the commands in its head.
    """
    also = f"  # or: {', '.join(others)}" if others else ""
    lines = [
        "# A first grid. Each line of `axes:` multiplies the jobs; every job is one measurement.",
        "#",
        f"#   nightgrid plan {file}                 every job, and why some will not run",
        f"#   nightgrid run {file} --emulate 1x2    tried on two emulated cards of this machine",
        f"#   nightgrid run {file}                  measured on the cards that are there",
        "#",
        "# `nightgrid plan` says what is wrong with it, where, and what would be right.",
        "",
        f"name: {name_of(fields['model'], file)}",
        "",
        "defaults:",
        *(
            f"  {name}: {_value(value)}{also if name == 'workload' else ''}"
            for name, value in fields.items()
        ),
        "",
        "experiments:",
        "  - name: precision-and-batch",
        "    axes:",
        f"      precision: [{', '.join(precisions)}]",
        f"      batch_size: {batch_sizes}",
        "",
        "# What else may stand under `defaults:`, in an experiment, or as an axis, with its",
        "# default:",
        "#",
    ]
    for name, declared in settings.items():
        default = "" if declared.default is ... else f" {_value(declared.default)}"
        lines.append(f"#   {name}:{default}")
        lines += [
            f"#       {line}" for line in textwrap.wrap(_sentence(declared), width=_WIDTH - 8)
        ]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """A value as YAML has it: JSON is YAML, and plain words need no quotes."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z~./][\w./~-]*", value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _sentence(declared: Declaration) -> str:
    """The first sentence of a description."""
    return re.split(r"(?<=[.!?])\s", declared.description, maxsplit=1)[0]
