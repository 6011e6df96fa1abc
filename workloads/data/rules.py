"""Parameters of workloads that read a dataset, and the rules that jobs with one must pass."""

from __future__ import annotations

from functools import lru_cache

from workloads.base import (
    BadConfiguration,
    DataMissing,
    JobDescription,
    Refusal,
    WorkloadParameters,
)
from workloads.data.catalog import Reading, changed_at, find_dataset
from workloads.settings import setting

#: Settings that only datasets of the hub have, with their defaults.
_OF_THE_HUB = {"split": "train", "revision": "", "subset": ""}


class DatasetParameters(WorkloadParameters):
    """Parameters of workloads that read a dataset: how it is read."""

    columns: str = setting(
        "",
        role="work",
        description="Which columns of the dataset are what, where their names are not among those "
        "that are known: `prompt=question, completion=reply`. Left out, the first example tells.",
    )
    split: str = setting(
        "train",
        role="work",
        min_length=1,
        description="Split of a dataset of the Hugging Face hub, or a part of one: `train[:1000]`.",
    )
    revision: str = setting(
        "",
        role="work",
        description="Branch, tag or commit of a dataset of the Hugging Face hub; a job has the "
        "commit that it means when the job is planned. Left out: the newest.",
    )

    subset: str = setting(
        "",
        role="work",
        description="Subset (configuration) of a dataset of the Hugging Face hub that has several, "
        "such as 3.0.0 of abisee/cnn_dailymail.",
    )

    def reading(self) -> Reading:
        """Return the way in which the dataset of a job is read."""
        return Reading(
            columns=self.columns, split=self.split, revision=self.revision, subset=self.subset
        )


def dataset_refusals(asked: JobDescription) -> tuple[Refusal, ...]:
    """A dataset that no node could read as it is asked for; one that is not here is not judged."""
    for name, value in asked.parameters.items():
        if value not in (_OF_THE_HUB.get(name, value), "") and not _is_of_the_hub(asked.dataset):
            reason = f"{asked.dataset} is no dataset of the hub, which alone has a {name}"
            return (
                Refusal(setting=name, reason=reason, hint="leave it out; name the file to read"),
            )
    columns = str(asked.parameters.get("columns") or "")
    message = _objection(asked.dataset, columns, changed_at(asked.dataset))
    if not message:
        return ()
    return (Refusal(setting="columns" if columns else "dataset", reason=message),)


@lru_cache(maxsize=256)  # jobs of a grid share a dataset
def _objection(name: str, columns: str, _changed_at_ns: int) -> str:
    try:
        find_dataset(name, Reading(columns=columns))
    except BadConfiguration as error:
        return str(error)
    except DataMissing:
        return ""
    return ""


def _is_of_the_hub(name: str) -> bool:
    """Return whether it is, or may be where a node reads it."""
    try:
        return find_dataset(name).kind == "hub"
    except (BadConfiguration, DataMissing):
        return True
