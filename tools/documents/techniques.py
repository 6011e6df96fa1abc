"""``docs/techniques.md`` from the techniques themselves: what each is, its settings, its limits.

``python -m tools.documents.techniques > docs/techniques.md`` writes it; a test compares. The
limits are found by asking each technique about every value alone, on every device.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from workloads.base import JobDescription, Refusal
from workloads.devices import DEVICES
from workloads.engines import default_engine
from workloads.finetuning import FinetuningParameters, refuse
from workloads.training.technique import Technique
from workloads.training.techniques import TECHNIQUES

#: Values to ask about where a setting has no list of them, and what has to be set beside some.
_TRIED: dict[str, tuple[Any, ...]] = {"save_every": (10,), "data_workers": (2,)}
_BESIDE: dict[str, dict[str, Any]] = {
    "non_blocking_copies": {"pin_memory": True},
    "save_mode": {"save_every": 10},
    "freeze_embeddings": {"method": "full"},
}
#: Settings that need more than one card to mean anything.
_GANG = ("strategy", "offload_optimizer", "offload_parameters", "gradient_compression")


def markdown() -> str:
    """The whole document."""
    parts = [
        "# Training techniques",
        "Generated from `workloads/training/techniques/` by "
        "`python -m tools.documents.techniques`; do not edit.",
        "Every technique is one or more settings of `workload: finetuning`, and any of them may "
        "stand under `axes:` or `include:` of an experiment. Unless told otherwise a technique "
        "changes how something is computed and not what is learned: the losses stay those of the "
        "plain job. `grids/techniques.yaml` runs each alone beside the baseline. What contradicts "
        "itself is refused when the grid is read; what a device cannot do becomes a row "
        "UNSUPPORTED with the reason, and so does what turns out on the card to have no effect.",
        "```bash\nnightgrid plan grids/techniques.yaml --emulate 1x2\n```",
        "The plan lists each technique as a job beside the baseline, and says why some will not "
        "run.",
    ]
    ours = (TECHNIQUES[name] for name in TECHNIQUES.own)
    for kind in sorted(ours, key=lambda kind: kind.title.lower()):
        parts += _section(kind)
    return "\n\n".join(parts) + "\n"


def _section(kind: type[Technique]) -> Iterator[str]:
    title = kind.title if "." in kind.title else kind.title[0].upper() + kind.title[1:]
    yield f"## {title}"
    summary, _, more = (inspect.getdoc(kind) or "").partition("\n\n")
    what = summary.partition(": ")[2] or summary  # the heading has the name
    yield f"{what[0].upper()}{what[1:]}\n{more}"
    lines = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for name, info in kind.model_fields.items():
        default = "null" if info.default is None else str(info.default).lower()
        lines.append(f"| `{name}` | {_values(info)} | `{default}` | {info.description} |")
    yield "\n".join(lines)
    if limits := [f"- {line}." for line in _limits(kind)]:
        yield "Not everywhere:\n\n" + "\n".join(limits)


def _choices(info: FieldInfo) -> list[Any]:
    kinds = [info.annotation, *get_args(info.annotation)]
    return [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]


def _values(info: FieldInfo) -> str:
    if choices := _choices(info):
        return ", ".join(f"`{value}`" for value in choices)
    if info.annotation is bool:
        return "`true`, `false`"
    return "number"


def _limits(kind: type[Technique]) -> Iterator[str]:
    for name, info in kind.model_fields.items():
        values = _choices(info) or list(_TRIED.get(name, ()))
        if info.annotation is bool:
            values = [True]
        for value in values:
            where: dict[str, list[str]] = {}
            for device in DEVICES.own:
                for refusal in _refusals(name, value, device):
                    where.setdefault(refusal.reason, []).append(device)
            text = "true" if value is True else value
            for reason, devices in where.items():
                yield f"`{name}: {text}` on {', '.join(devices)}: {reason}"


def _refusals(name: str, value: Any, device: str) -> list[Refusal]:
    """Refusals by a device of a job with this one setting; contradictions are left out."""
    beside = _BESIDE.get(name, {})
    parameters = FinetuningParameters.model_validate({**beside, name: value}).model_dump()
    asked = JobDescription(
        model="tiny-chatglm3",
        dataset="advertisegen-synthetic",
        precision="bf16" if str(value).startswith("flash") else "fp32",
        device=device,
        batch_size=8,
        cards=2 if name in _GANG else 1,
        parameters=parameters,
        engine=default_engine("train"),
    )
    return [refusal for refusal in refuse(asked) if refusal.unsupported and refusal.setting == name]


if __name__ == "__main__":
    sys.stdout.write(markdown())
