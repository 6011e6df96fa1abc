"""Datasets by name: embedded ones, files, directories, and those of the Hugging Face hub.

Embedded ones need no network. AdvertiseGen itself is not shipped: point ``dataset:`` at the
directory with its ``train.json`` and ``dev.json``, or at any file of a known shape (``shapes.py``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

from workloads.base import BadConfiguration, DataMissing, JobDescription, Refusal
from workloads.data import embedded
from workloads.data.records import ADVERTISEGEN_FILES, ENDINGS, Placed, hub_records, records
from workloads.data.shapes import (
    ANSWER,
    WHOLE_TEXT,
    Columns,
    Example,
    columns_named,
    columns_of,
)
from workloads.settings import WorkloadParameters, setting

#: Examples of a file that a plan reads.
FIRST_EXAMPLES = 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A job's settings for reading a dataset."""

    columns: str = ""  # "": inferred from the first example
    split: str = "train"  # hub datasets only, as are the next two
    revision: str = ""  # "": the newest
    subset: str = ""  # "": the only one


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """A dataset that exists."""

    name: str
    kind: Literal["embedded", "file", "directory", "hub"]
    path: Path | None = None  # files and directories only
    synthetic: bool = False
    description: str = ""
    make: Callable[[], Sequence[Example]] = tuple  # embedded ones only


EMBEDDED: dict[str, DatasetEntry] = {
    name: DatasetEntry(
        name=name,
        kind="embedded",
        synthetic=name.endswith("synthetic"),
        description=description,
        make=cache(make),  # once per process: many jobs share it
    )
    for name, description, make in (
        (
            "advertisegen-synthetic",
            "1000 made-up Chinese product attribute lists and advertisements, of AdvertiseGen's "
            "shape and lengths",
            lambda: embedded.synthetic_examples(1000),
        ),
        (
            "english-prompts",
            "varied English prompts of 5 to 300 words, written for this project",
            lambda: [Example(content=prompt) for prompt in embedded.ENGLISH_PROMPTS],
        ),
        (
            "english-corpus-synthetic",
            "1500 made-up English articles, some 370,000 tokens of tiny-bert, for pretraining",
            lambda: embedded.english_articles(1500),
        ),
        (
            "cnn-dailymail-synthetic",
            "100 made-up English news articles with highlights, of CNN/DailyMail's shape and "
            "lengths",
            lambda: embedded.news_examples(100),
        ),
        (
            "image-prompts",
            "16 English descriptions of pictures for text-to-image",
            lambda: [Example(content=prompt) for prompt in embedded.IMAGE_PROMPTS],
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A loaded dataset, examples in order."""

    examples: list[Example]
    synthetic: bool
    learned: str  # the part of each that fine-tuning learns, for the row


def find_dataset(name: str, reading: Reading | None = None) -> DatasetEntry:
    """Return the dataset of this name, path or hub id; reads at most a file's first examples.

    Args:
        reading: if given, the first examples must have its shape; not checked on the hub.

    Raises:
        DataMissing: unknown dataset; the message lists close matches.
        BadConfiguration: the examples have no known shape, or not the named one.
    """
    entry = _entry(name)
    if entry.path is None:
        return entry
    first = _first(entry.path, changed_at(name))
    if not first:
        raise _no_examples(name)
    if reading is not None:
        _examples(iter(first), name, reading)
    record = first[0][1]
    return replace(entry, synthetic=isinstance(record, dict) and record.get("synthetic") is True)


def changed_at(name: str) -> int:
    """Return a dataset file's modification time in ns since the epoch; 0 if it is no file."""
    try:
        return Path(name).expanduser().stat().st_mtime_ns
    except (OSError, ValueError, RuntimeError):
        return 0


@lru_cache(maxsize=8)
def _first(path: Path, _changed_at_ns: int) -> tuple[Placed, ...]:
    """Return the records that a plan looks at, cached for several checks."""
    return tuple(islice(records(path), FIRST_EXAMPLES))


def _entry(name: str) -> DatasetEntry:
    """Return the dataset of this name or path without reading it."""
    if name in EMBEDDED:
        return EMBEDDED[name]
    path = Path(name).expanduser()
    with suppress(OSError, ValueError):  # a name too long for the file system, or with a NUL in it
        if path.is_file():
            return DatasetEntry(name=name, kind="file", path=path)
        if path.is_dir():
            return DatasetEntry(name=name, kind="directory", path=path)
    if _HUB_ID.match(name) and not name.endswith(ENDINGS) and not path.parent.is_dir():
        return DatasetEntry(name=name, kind="hub")
    close = difflib.get_close_matches(name, EMBEDDED, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(EMBEDDED)}."
    raise DataMissing(
        f"no dataset {name!r}: neither an embedded one nor a file or directory here. {hint} A path "
        f"may name a file ({', '.join(ENDINGS)}), a directory of them, or one with AdvertiseGen's "
        f"{' and '.join(ADVERTISEGEN_FILES)}; org/name is a dataset of the Hugging Face hub."
    )


def load_dataset(name: str, reading: Reading | None = None) -> Dataset:
    """Read a whole dataset, merging an AdvertiseGen directory's files.

    Raises:
        DataMissing: there is no such dataset, it cannot be read, or it has no examples.
        BadConfiguration: an example has another shape (with file and line), or none is known.
    """
    reading = reading or Reading()
    entry = _entry(name)
    if entry.kind == "embedded":
        examples, answers = list(entry.make()), ANSWER
    else:
        placed = (
            records(entry.path)
            if entry.path is not None
            else hub_records(name, reading.split, reading.revision, reading.subset)
        )
        examples, columns = _examples(placed, name, reading)
        answers = columns.shape.learned
    return Dataset(
        examples=examples,
        synthetic=entry.synthetic or examples[0].synthetic,
        learned=_learned(examples, answers),
    )


def load_examples(name: str, reading: Reading | None = None) -> list[Example]:
    """Return all examples of a dataset in a fixed order; see ``load_dataset``."""
    return load_dataset(name, reading).examples


def _learned(examples: Sequence[Example], answers: str) -> str:
    """Describe the learned part; ``answers`` names it for examples that have an answer."""
    without = sum(not example.summary for example in examples)
    if without == len(examples):
        return WHOLE_TEXT
    several = f"; {WHOLE_TEXT} of {without:,} of {len(examples):,} examples, which have no answer"
    return answers + (several if without else "")


def _examples(
    placed: Iterator[Placed], name: str, reading: Reading
) -> tuple[list[Example], Columns]:
    columns = columns_named(reading.columns) if reading.columns else None
    examples = []
    for where, record in placed:
        columns = columns or columns_of(record, where)
        examples.append(columns.example(record, where))
    if columns is None or not examples:
        raise _no_examples(name)
    return examples, columns


def _no_examples(name: str) -> DataMissing:
    return DataMissing(
        f"{name} holds no examples; expected a JSON object a line, or a table with a line of names"
    )


#: Settings of hub datasets only, with their defaults.
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
        """Return how the job's dataset is read."""
        return Reading(
            columns=self.columns, split=self.split, revision=self.revision, subset=self.subset
        )


def dataset_refusals(job: JobDescription) -> tuple[Refusal, ...]:
    """Refuse a dataset that no node could read this way; a dataset missing here is not judged."""
    columns = str(job.parameters.get("columns") or "")
    kind, message = _judged(job.dataset, columns, changed_at(job.dataset))
    for name, usual in _OF_THE_HUB.items():
        if job.parameters.get(name, usual) not in (usual, "") and kind not in ("hub", ""):
            reason = f"{job.dataset} is no dataset of the hub, which alone has a {name}"
            hint = "leave it out; name the file to read"
            return (Refusal(setting=name, reason=reason, hint=hint),)
    if not message:
        return ()
    return (Refusal(setting="columns" if columns else "dataset", reason=message),)


@lru_cache(maxsize=256)  # jobs of a grid share a dataset
def _judged(name: str, columns: str, _changed_at_ns: int) -> tuple[str, str]:
    """Return a dataset's kind ("" if unknown here) and what is wrong with it."""
    try:
        return find_dataset(name, Reading(columns=columns)).kind, ""
    except BadConfiguration as error:
        return "", str(error)
    except DataMissing:
        return "", ""
