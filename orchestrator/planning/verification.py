"""Verification grid for a grid's generation jobs. Pure.

Each model, adapter, precision, engine and mode is verified once: batch sizes, card counts and
lengths do not change the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.job import Job, Scalar
from orchestrator.core.measurement import Measurement
from workloads import registry

_WORKLOAD = "verification"
#: Names of runs have at most 64 characters.
_LONGEST_NAME = 64


def verification_grid(
    name: str,
    jobs: Sequence[Job],
    *,
    open_engines: Collection[str] = (),
    prompts: int,
    output_tokens: int,
    batch_size: int,
) -> dict[str, Any] | None:
    """Content of the grid file that verifies these jobs; None if none generates text. The plan
    chooses the engine for experiments in ``open_engines``."""
    experiments: dict[tuple[object, ...], dict[str, Any]] = {}
    for job in jobs:
        if job.workload not in ("text-generation", _WORKLOAD):
            continue
        carried = _carried(job.engine, dict(job.parameters))
        settings: dict[str, Any] = {
            "model": job.model,
            "dataset": job.dataset,
            "accelerator": str(job.accelerator),
            "precision": job.precision,
            **({} if job.experiment in open_engines else {"engine": job.engine}),
            **carried,
        }
        experiments.setdefault(tuple(settings.items()), settings)
    if not experiments:
        return None
    return {
        "name": f"verify-{name}"[:_LONGEST_NAME],
        "description": f"Do the engines of {name} compute what stock transformers computes?",
        "defaults": {
            "workload": _WORKLOAD,
            "prompts": prompts,
            "output_tokens": output_tokens,
            "batch_size": batch_size,
        },
        "experiments": [
            {"name": f"verify-{number}", **settings}
            for number, settings in enumerate(experiments.values(), start=1)
        ],
    }


def _carried(engine: str, parameters: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Settings that verification shares with the job, except lengths."""
    return {
        name: parameters[name]
        for name, declaration in registry.declared(_WORKLOAD, engine).items()
        if not declaration.length and parameters.get(name) is not None
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Outcome of one comparison."""

    model: str
    accelerator: str
    engine: str
    precision: str
    settings: str  # those taken over from the grid, where it says them
    agrees: str  # the row's word, or the state of a job that gave none
    largest_difference: float | None  # of any logit
    spread: float | None  # standard deviation of the reference's logits
    compared: str  # "64 of 64"
    note: str  # where texts part, or why there is no answer
    emulated: bool

    @property
    def wrong(self) -> bool:
        """Return whether numbers are off, or a due answer is missing."""
        return self.agrees in ("no", "FAILED", "TIMED_OUT", "LOST", "NOT_STARTED")


def verified(rows: Sequence[Measurement]) -> list[Verified]:
    """The answers in final rows of verification jobs, in the order of the rows."""
    answers = []
    for row in rows:
        if not row.final or row.workload != _WORKLOAD:
            continue
        compared, reference = map(row.reported, ("compared_tokens", "reference_tokens"))
        tokens = row.details.get("compared_tokens", "")  # of version 0.1.0: "18 of 18"
        if compared is not None and reference is not None:
            tokens = f"{compared:.0f} of {reference:.0f}"
        carried = _carried(row.engine, row.parameters)
        answers.append(
            Verified(
                model=row.model,
                accelerator=str(row.accelerator),
                engine=row.engine,
                precision=row.precision,
                settings=", ".join(f"{name} {value}" for name, value in carried.items()),
                agrees=row.details.get("agrees", str(row.state)),
                largest_difference=row.reported("largest_logit_difference"),
                spread=row.reported("logit_spread"),
                compared=tokens,
                note=row.details.get("first_parting") or row.reason,
                emulated=row.emulated,
            )
        )
    return answers
