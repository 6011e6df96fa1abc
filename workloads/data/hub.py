"""Records of a dataset of the Hugging Face hub, through its own library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workloads.base import DataMissing
from workloads.data.records import Placed


def hub_records(
    name: str, split: str = "train", revision: str = "", subset: str = ""
) -> Iterator[Placed]:
    """The records of a split, from the cache of this node or over the network.

    Code that comes with a dataset is never run: ``datasets`` has no way to since its version 4.

    Args:
        name: the hub id, ``org/name``.
        split: as ``datasets`` takes it, such as ``train`` or ``train[:1000]``.
        revision: a branch, tag or commit; "" is the newest.
        subset: its configuration, such as a version of the data; "" where it has one.

    Raises:
        DataMissing: it cannot be had.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        table: Any = datasets.load_dataset(
            name, subset or None, split=split, revision=revision or None
        )
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataMissing(
            f"dataset {name} of the Hugging Face hub, split {split}: {error}; if a path was meant, "
            "there is no such path on this node"
        ) from error
    for number, record in enumerate(table, 1):
        yield f"{name}: example {number}", record
