"""Datasets by name: embedded ones, files, directories, and those of the Hugging Face hub.

Embedded ones need no network. AdvertiseGen itself is not shipped: point ``dataset:`` at the
directory with its ``train.json`` and ``dev.json``, or at any file of a known shape (``shapes.py``).
"""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

from workloads.base import RECORDS, BadConfiguration, DataMissing, JobDescription, Refusal
from workloads.data import embedded
from workloads.data.records import (
    ADVERTISEGEN_FILES,
    COMPRESSED,
    ENDINGS,
    BadExample,
    Placed,
    hub_records,
    records,
)
from workloads.data.shapes import (
    ANSWER,
    WHOLE_TEXT,
    Example,
    Unusable,
    columns_named,
    columns_of,
)
from workloads.settings import WorkloadParameters, work
from workloads.util.files import no_file

#: Seconds after which a plan stops looking at the records of a dataset.
LOOK_S = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A job's settings for reading a dataset."""

    columns: str = ""  # "": inferred from the first example
    split: str = "train"  # of a directory or a hub dataset
    revision: str = ""  # hub datasets only, as is the next; "": the newest
    subset: str = ""  # "": the only one


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A dataset that exists, and its examples in order once it is loaded."""

    name: str
    kind: Literal["embedded", "file", "directory", "hub"]
    path: Path | None = None  # files and directories only
    synthetic: bool = False
    description: str = ""
    unnamed: str = ""  # ``columns:`` that would name a likely answer, which is not read
    learned: str = ""  # the part of each example that fine-tuning learns; "": not looked at
    notes: str = ""  # what is left out of its records, and other things a reader must know
    make: Callable[[], Sequence[Example]] = tuple  # embedded ones only
    examples: list[Example] = field(default_factory=list, hash=False)

    @property
    def details(self) -> dict[str, str]:
        """Details of a row about its data."""
        return {RECORDS: self.notes} if self.notes else {}


EMBEDDED: dict[str, Dataset] = {
    name: Dataset(
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


def find_dataset(name: str, reading: Reading | None = None) -> Dataset:
    """Return the dataset of this name, path or hub id, its files' records looked at.

    With a ``reading`` records must have its shape, which is not checked on the hub. Raises
    DataMissing with close matches, and BadConfiguration for examples of no known shape, or not the
    named one.
    """
    entry = _entry(name)
    if entry.path is None:
        return entry
    return _looked_at(entry, reading or Reading(), changed_at(name), reading is not None)


def changed_at(name: str) -> int:
    """Return when a dataset's newest file was modified, in ns since the epoch; 0 if unknown."""
    try:
        path = Path(name).expanduser()
        inside = path.rglob("*") if path.is_dir() else ()
        return max(one.stat().st_mtime_ns for one in (path, *islice(inside, 1000)))
    except (OSError, ValueError, RuntimeError):
        return 0


@lru_cache(maxsize=64)  # jobs of a grid share a dataset
def _looked_at(entry: Dataset, reading: Reading, _changed_at_ns: int, shaped: bool) -> Dataset:
    """Read all records of files, or as many as there is time for."""
    assert entry.path is not None
    found = records(entry.path, reading.split)
    if not shaped:  # columns are named elsewhere: the first record will do
        try:
            first = next(found, None)
        except BadConfiguration:
            if entry.kind != "directory":
                raise
            return entry  # so may be its split
        if first is None:
            raise _no_examples(entry.name)
        record = first[1]
        synthetic = isinstance(record, dict) and record.get("synthetic") is True
        return replace(entry, synthetic=synthetic)
    read = _Records(reading)
    stopped = not read.take_all(found, entry.name, LOOK_S)
    dataset = read.described(entry)
    if not stopped:
        return dataset
    note = f"the first {read.count:,} records were looked at, in {LOOK_S:g} s"
    return replace(dataset, notes="; ".join(filter(None, (dataset.notes, note))))


class _Records:
    """Examples of a dataset as they are read, without those that are left out."""

    def __init__(self, reading: Reading, keep: list[Example] | None = None) -> None:
        self.columns = columns_named(reading.columns) if reading.columns else None
        # Columns that are named and in no record yet; one record may well leave out empty ones.
        self._absent = set(self.columns.names.values()) if self.columns else set()
        self._first: Placed = "", {}
        self.keep = keep
        self.count = self.usable = self.without_answer = self.joined = 0
        self.synthetic = False
        self._left_out: dict[str, tuple[int, str]] = {}  # kind -> count, first message

    def take_all(self, found: Iterator[Placed], name: str, seconds: float = math.inf) -> bool:
        """Take all records, or as many as there is time for; return whether it was all of them.
        Raises DataMissing without any, BadExample if one or most cannot be used, or none has a
        column that is named."""
        until = time.monotonic() + seconds
        finished = True
        for number, (where, record) in enumerate(found, 1):
            self.take(record, where)
            if number % 256 == 0 and time.monotonic() > until:
                finished = False
                break
        left_out = self.count - self.usable
        if not self.count:
            raise _no_examples(name)
        if self._absent and finished:
            where, record = self._first
            raise BadExample(
                f"{where}: columns: names {min(self._absent)!r}, which no record has; this one has "
                f"{', '.join(map(str, record)):.200}"
            )
        if left_out > self.usable:
            first = next(iter(self._left_out.values()))[1]
            many = f"; so are {left_out - 1:,} more of {self.count:,} records" * (left_out > 1)
            raise BadExample(f"{first}{many}")
        return finished

    def take(self, record: object, where: str) -> None:
        """Take the next record; raises BadExample for one that no file of this shape may have."""
        self.count += 1
        if self._absent and isinstance(record, Mapping):
            self._first = self._first if self.count > 1 else (where, record)
            self._absent -= record.keys()
        try:
            self.columns = self.columns or columns_of(record, where)
            example = self.columns.example(record, where)
        except Unusable as error:
            count, first = self._left_out.get(error.kind, (0, str(error)))
            self._left_out[error.kind] = (count + 1, first)
            return
        self.usable += 1
        self.without_answer += not example.summary
        self.joined += example.joined
        if self.usable == 1:
            self.synthetic = example.synthetic
        if self.keep is not None:
            self.keep.append(example)

    def described(self, dataset: Dataset) -> Dataset:
        """Return the dataset with what its records say of it."""
        assert self.columns is not None
        notes = []
        if left_out := self.count - self.usable:
            kinds = sorted(self._left_out.values(), key=lambda one: -one[0])
            firsts = ", ".join(f"{count:,}: {first}" for count, first in kinds[:3])
            more = f" and {len(kinds) - 3} kinds more" if len(kinds) > 3 else ""
            notes.append(f"{left_out:,} of {self.count:,} records are left out ({firsts}{more})")
        if self.joined:
            notes.append(f"neighbouring turns of one role are joined in {self.joined:,} records")
        return replace(
            dataset,
            synthetic=dataset.synthetic or self.synthetic,
            unnamed=self.columns.unnamed,
            learned=_learned(self.usable, self.without_answer, self.columns.shape.learned),
            notes="; ".join(notes),
        )


def _entry(name: str) -> Dataset:
    """Return the dataset of this name or path without reading it."""
    if name in EMBEDDED:
        return EMBEDDED[name]
    path = Path(name).expanduser()
    with suppress(OSError, ValueError):  # a name too long for the file system, or with a NUL in it
        if path.is_file():
            return Dataset(name=name, kind="file", path=path)
        if path.is_dir():
            return Dataset(name=name, kind="directory", path=path)
        if reason := no_file(path):
            raise DataMissing(f"{name}: {reason}")
    is_file_name = name.lower().endswith((*ENDINGS, *COMPRESSED))
    if _HUB_ID.match(name) and not is_file_name and not path.parent.is_dir():
        return Dataset(name=name, kind="hub")
    close = difflib.get_close_matches(name, EMBEDDED, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(EMBEDDED)}."
    raise DataMissing(
        f"no dataset {name!r}: neither an embedded one nor a file or directory here. {hint} A path "
        f"may name a file ({', '.join(ENDINGS)}), a directory of them, or one with AdvertiseGen's "
        f"{' and '.join(ADVERTISEGEN_FILES)}; org/name is a dataset of the Hugging Face hub."
    )


def load_dataset(name: str, reading: Reading | None = None) -> Dataset:
    """Read a whole dataset, merging an AdvertiseGen directory's files.

    Raises DataMissing without such a dataset or any example in it, and BadConfiguration, with file
    and line, for an example of another shape.
    """
    reading = reading or Reading()
    entry = _entry(name)
    if entry.kind == "embedded":
        examples = list(entry.make())
        without = sum(not example.summary for example in examples)
        learned = _learned(len(examples), without, ANSWER)
        return replace(entry, examples=examples, learned=learned)
    return _read(entry, reading, changed_at(name))


@lru_cache(maxsize=2)  # a warm worker reads a file once
def _read(entry: Dataset, reading: Reading, _changed_at_ns: int) -> Dataset:
    found = (
        records(entry.path, reading.split)
        if entry.path is not None
        else hub_records(entry.name, reading.split, reading.revision, reading.subset)
    )
    examples: list[Example] = []
    read = _Records(reading, examples)
    read.take_all(found, entry.name)
    return replace(read.described(entry), examples=examples)


def placed_examples(name: str, reading: Reading) -> Iterator[tuple[str, Example]]:
    """Yield the usable examples of a dataset that is not on a hub, with their places, as they are
    read; raises as ``load_dataset``."""
    entry = _entry(name)
    for number, example in enumerate(entry.make(), 1):
        yield f"{name}: example {number}", example
    read = _Records(reading, keep=[])
    for where, record in records(entry.path, reading.split) if entry.path is not None else ():
        read.take(record, where)
        while read.keep:
            yield where, read.keep.pop()


def load_examples(name: str, reading: Reading | None = None) -> list[Example]:
    """Return all examples of a dataset in a fixed order; see ``load_dataset``."""
    return load_dataset(name, reading).examples


def _learned(count: int, without: int, answers: str) -> str:
    """Describe the learned part; ``answers`` names it for examples that have an answer."""
    if without == count:
        return WHOLE_TEXT
    several = f"; {WHOLE_TEXT} of {without:,} of {count:,} examples, which have no answer"
    return answers + (several if without else "")


def _no_examples(name: str) -> DataMissing:
    return DataMissing(
        f"{name} holds no examples; expected a JSON object a line, or a table with a line of names"
    )


#: Settings of hub datasets only; ``split`` is one of directories, too.
_OF_THE_HUB = {"split": "train", "revision": "", "subset": ""}


class DatasetParameters(WorkloadParameters):
    """Parameters of workloads that read a dataset: how it is read."""

    columns: str = work(
        "",
        description="Which columns of the dataset are what, where their names are not among those "
        "that are known: `prompt=question, completion=reply`. Left out, the first example tells.",
    )
    split: str = work(
        "train",
        min_length=1,
        description="Split of a directory whose files are named by splits, or of a dataset of the "
        "Hugging Face hub; of the latter also a part: `train[:1000]`.",
    )
    revision: str = work(
        "",
        description="Branch, tag or commit of a dataset of the Hugging Face hub; a job has the "
        "commit that it means when the job is planned. Left out: the newest.",
    )

    subset: str = work(
        "",
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
    reading, kind, message = reading_of(job), "", ""
    try:
        kind = find_dataset(job.dataset, reading).kind
    except BadConfiguration as error:
        message = str(error)
    except DataMissing:
        pass
    if name := without_use(kind, job.parameters):
        reason = f"{job.dataset} is no dataset of the hub, which alone has a {name}"
        hint = "leave it out; name the file to read"
        return (Refusal(setting=name, reason=reason, hint=hint),)
    if not message:
        return ()
    return (Refusal(setting="columns" if reading.columns else "dataset", reason=message),)


def without_use(kind: str, values: Mapping[str, object]) -> str:
    """Return a setting that is set and that datasets of this kind lack, "" if none; a ``kind`` ""
    is unknown."""
    if kind in ("hub", ""):
        return ""
    for name, usual in _OF_THE_HUB.items():
        of_directory = name == "split" and kind == "directory"
        if values.get(name, usual) not in (usual, "") and not of_directory:
            return name
    return ""


def dataset_notes(job: JobDescription) -> tuple[str, ...]:
    """Return what a plan says of a dataset that is here: what is left out of it."""
    entry = _found(job)
    return (f"dataset {job.dataset}: {entry.notes}",) if entry is not None and entry.notes else ()


def learning_notes(job: JobDescription) -> tuple[str, ...]:
    """Return what a plan says fine-tuning learns of a dataset that is here."""
    entry = _found(job)
    learned = entry.learned if entry is not None else ""
    return (f"fine-tuning on {job.dataset} learns {learned}",) if learned else ()


def learning_refusals(job: JobDescription) -> tuple[Refusal, ...]:
    """Refuse to learn prompts where a column is likely the answer and is not named."""
    entry = _found(job)
    if entry is None or not entry.unnamed:
        return ()
    return (Refusal(setting="dataset", reason=unnamed(job.dataset, entry.unnamed)),)


def _found(job: JobDescription) -> Dataset | None:
    """A job's dataset; None if it is not here or wrong."""
    try:
        return find_dataset(job.dataset, reading_of(job))
    except (BadConfiguration, DataMissing):
        return None


def reading_of(job: JobDescription) -> Reading:
    """Return how a job's dataset is read; that of a hub is not read by plans."""
    return Reading(
        columns=str(job.parameters.get("columns") or ""),
        split=str(job.parameters.get("split") or "train"),
    )


def unnamed(name: str, columns: str) -> str:
    """Return why a dataset is not learned whose answer is not named."""
    answer = columns.rpartition("=")[2]
    return (
        f'{name} has a column "{answer}" that is likely the answer, and without it the prompts '
        f"would be learned; write columns: {columns}"
    )
