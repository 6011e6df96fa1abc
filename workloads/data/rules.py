"""Rules of datasets: the first examples have the shape that a job reads. No torch."""

from __future__ import annotations

from functools import lru_cache

from workloads.data.catalog import Reading, changed_at, find_dataset
from workloads.errors import BadConfiguration, DataMissing
from workloads.refusal import Asked, Refusal


def dataset_refusals(asked: Asked) -> tuple[Refusal, ...]:
    """A dataset that no node could read as it is asked for; one that is not here is not judged."""
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
