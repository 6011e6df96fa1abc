"""Settings that every job has: types, defaults, roles, and what a row's parameters mean today.

A batch size may be a search: ``max`` (the largest that fits) or ``best`` (the fastest), stored as
text such as ``max(cap=4096, tolerance=0.05)``; in a grid ``{max: {cap: 4096, tolerance: 0.05}}``.
A setting that nothing here declares counts as work: rows that differ in it are never ranked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from workloads import registry
from workloads.data.datasets import EMBEDDED as DATASETS
from workloads.devices import own_devices
from workloads.engines import default_engine
from workloads.models.catalog import EMBEDDED as MODELS
from workloads.settings import Declaration, Settings, Value, declarations, setting

Goal = Literal["max", "best"]
GOALS: tuple[Goal, ...] = get_args(Goal)

#: Default of the largest size to try.
CAP = 1024
LARGEST_CAP = 1_000_000
#: Shares: of the size by which ``max`` may miss; of throughput within which ``best`` is a tie.
TOLERANCES: Mapping[str, float] = {"max": 0.0, "best": 0.05}

#: The text of a search; what ``parse`` takes.
PATTERN = (
    r"^(max|best)(\((cap=[1-9][0-9]{0,6}|tolerance=0(\.[0-9]{1,6})?"
    r"|cap=[1-9][0-9]{0,6}, tolerance=0(\.[0-9]{1,6})?)\))?$"
)
_PATTERN = re.compile(PATTERN)
HINT = "write max, best or {max: {cap: 4096, tolerance: 0.05}}"


def batch_text(workload: str, size: object) -> str:
    """A batch size in a label: ``b=8``; "" where a server makes its own batches."""
    spec = registry.WORKLOADS.get(workload)
    return "" if spec is not None and spec.windows and str(size) == "1" else f"b={size}"


@dataclass(frozen=True, slots=True)
class Search:
    """Search for a batch size."""

    goal: Goal
    cap: int
    tolerance: float  # share; see ``TOLERANCES``

    @property
    def text(self) -> str:
        """Text of the search, as in ``Job.batch_size``."""
        limits = []
        if self.cap != CAP:
            limits.append(f"cap={self.cap}")
        if self.tolerance != TOLERANCES[self.goal]:
            limits.append(f"tolerance={self.tolerance:.6f}".rstrip("0").rstrip("."))
        return f"{self.goal}({', '.join(limits)})" if limits else self.goal


@lru_cache(maxsize=256)
def search_of(batch_size: int | str) -> Search | None:
    """Search of a job's batch size; None for a number; raises ValueError for other text."""
    if not isinstance(batch_size, str):
        return None
    match = _PATTERN.match(batch_size)
    if match is None:
        raise ValueError(f"{batch_size!r} is no batch size; {HINT}")
    limits = dict(re.findall(r"(\w+)=([0-9.]+)", batch_size))
    goal: Goal = "max" if match[1] == "max" else "best"
    return Search(
        goal, int(limits.get("cap", CAP)), float(limits.get("tolerance", TOLERANCES[goal]))
    )


def from_mapping(wish: Mapping[str, Any]) -> str:
    """Text of a search written as a mapping; raises ValueError for any other mapping."""
    if len(wish) != 1 or (goal := next(iter(wish))) not in GOALS:
        raise ValueError(f"a search for a batch size has one key, {' or '.join(GOALS)}; {HINT}")
    limits = {"cap": CAP, "tolerance": TOLERANCES[goal]}
    given = wish[goal] if wish[goal] is not None else {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{goal} takes a mapping of cap and tolerance; {HINT}")
    for name, value in given.items():
        if name not in limits:
            raise ValueError(f"{goal} has no {name}; it has {' and '.join(limits)}")
        wanted = (int,) if name == "cap" else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            kind = "a whole number" if name == "cap" else "a number"
            raise ValueError(f"{name} of {goal} is {value!r}, not {kind}")
        limits[name] = value
    if not 1 <= limits["cap"] <= LARGEST_CAP:
        raise ValueError(f"cap of {goal} is {limits['cap']}, not 1 to {LARGEST_CAP:,}")
    if not 0 <= limits["tolerance"] < 1:
        raise ValueError(f"tolerance of {goal} is {limits['tolerance']}, not 0 to below 1")
    return Search(goal, int(limits["cap"]), round(float(limits["tolerance"]), 6)).text


#: The built-in kinds of cards: HPU (Intel Gaudi), GPU (NVIDIA), CPU.
_KINDS = [
    f"{spec.accelerator} ({spec.summary})" if spec.summary else spec.accelerator
    for spec in own_devices()
]


class JobFields(Settings):
    """The settings that every job has. An absent one takes its default; two have none."""

    workload: str = setting(
        role="work",
        loads=True,
        always_in_id=True,
        description="What is run. One experiment has one workload.",
    )
    model: str = setting(
        role="work",
        loads=True,
        consumes="model",
        always_in_id=True,
        min_length=1,
        description=f"An embedded model ({', '.join(MODELS)}), a directory that transformers or "
        "diffusers loads, an id of the Hugging Face hub (org/name, org/name@REVISION: a job has "
        "the commit that it means), random:chatglm3-6b (random:DIR): a known shape with random "
        "weights, made on the card, before anything is downloaded; or the name under which a job "
        "saves one (save_model), for which the job then waits.",
    )
    dataset: str = setting(
        "advertisegen-synthetic",
        role="work",
        consumes="dataset",
        always_in_id=True,
        min_length=1,
        description=f"An embedded dataset ({', '.join(DATASETS)}), a file (JSON lines or list, "
        "CSV, TSV, Parquet), a directory of them such as AdvertiseGen's, or a hub id. Examples are "
        "pairs of texts, chats or plain text (docs/data.md). Left out: the workload's own, if it "
        "has one.",
    )
    accelerator: str = setting(
        own_devices()[0].accelerator,
        role="work",
        always_in_id=True,
        description=f"The kind of card: {', '.join(_KINDS[:-1])} or {_KINDS[-1]}. Several may be "
        "listed; each job is then run on each.",
    )
    cards: int = setting(
        1,
        role="work",
        always_in_id=True,
        ge=1,
        le=4096,
        description="Cards that one job holds, all of one node or several whole nodes. On Gaudi "
        "1, 2, 4 or 8 of a server.",
    )
    precision: str = setting(
        "bf16",
        role="choice",
        loads=True,
        always_in_id=True,
        description="Format of the weights; `nightgrid schema precisions` says what each means.",
    )
    batch_size: (
        Annotated[int, Field(ge=1, le=LARGEST_CAP)]
        | Literal["max", "best"]
        | Annotated[str, Field(pattern=PATTERN)]
    ) = setting(
        1,
        role="choice",
        length=True,
        always_in_id=True,
        description="Prompts (or training samples) per batch and card; `max` finds the largest "
        "that fits, `best` the fastest.",
    )
    engine: str = setting(
        default_engine(),
        role="choice",
        loads=True,
        always_in_id=True,
        description="The library that runs the model. Left out: transformers; on Gaudi and on CPUs "
        "the plan chooses by what the nodes have (docs/gaudi.md, docs/deployment.md).",
    )
    isolation: Literal["warm", "process"] = setting(
        "warm",
        role="choice",
        always_in_id=True,
        description="`warm`: a worker keeps its model loaded for the next job that can use it; "
        "`process`: every job gets a process of its own.",
    )


FIELDS = declarations(JobFields)

#: Settings that a grid may also write as a mapping, and what makes a value of it.
MAPPINGS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "batch_size": from_mapping,
    "slo": lambda limits: ", ".join(f"{name}={value}" for name, value in sorted(limits.items())),
}


def declared_of(workload: str, engine: str) -> Mapping[str, Declaration]:
    """Declaration of each setting by name: fields of every job, then the workload's."""
    return {**FIELDS, **registry.declared_in_rows(workload, engine)}


def usual_engine(workload: str) -> str:
    """Default engine of a workload."""
    entry = registry.WORKLOADS.get(workload)
    return entry.default_engine if entry is not None else str(FIELDS["engine"].default)


def as_declared(workload: str, engine: str, parameters: Mapping[str, Value]) -> dict[str, Value]:
    """Translate parameters to this version, defaults filled in; settings of another engine that
    have no effect are left out."""
    declared = registry.declared_in_rows(workload, engine)
    settings = {n: d.default for n, d in declared.items() if d.default is not ...}
    for name, value in parameters.items():
        if name in declared:
            settings[name] = declared[name].current(value)
    for name in _beside(workload, declared, parameters):
        if parameters[name] is not None:
            settings[name] = parameters[name]
    return settings


def undeclared(workload: str, engine: str, parameters: Mapping[str, Value]) -> list[str]:
    """The names of parameters that nothing here declares."""
    return _beside(workload, registry.declared_in_rows(workload, engine), parameters)


def _beside(
    workload: str, declared: Mapping[str, Declaration], parameters: Mapping[str, Value]
) -> list[str]:
    entry = registry.WORKLOADS.get(workload)
    moved = entry.moved if entry is not None else {}
    return [
        name
        for name, value in parameters.items()
        if name not in declared and not (name in moved and moved[name] == value)
    ]
