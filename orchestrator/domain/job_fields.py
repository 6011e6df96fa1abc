"""The settings that every job has, whatever its workload: their types, defaults and roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.domain.batch_size import LARGEST_CAP, PATTERN, from_mapping
from workloads.data.catalog import EMBEDDED as DATASETS
from workloads.devices import own_devices
from workloads.engines import default_engine
from workloads.models.catalog import EMBEDDED as MODELS
from workloads.settings import Settings, declarations, setting


def _told_kinds() -> str:
    """Our kinds of cards: "HPU (Intel Gaudi), GPU (NVIDIA) or CPU"."""
    told = [
        f"{spec.accelerator} ({spec.summary})" if spec.summary else spec.accelerator
        for spec in own_devices()
    ]
    return f"{', '.join(told[:-1])} or {told[-1]}"


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
        description=f"The kind of card: {_told_kinds()}. Several may be listed; each job is then "
        "run on each.",
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
MAPPINGS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"batch_size": from_mapping}
