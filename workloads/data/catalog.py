"""Datasets by name: the embedded ones, files, directories, and those of the Hugging Face hub.

``advertisegen-synthetic`` and ``english-prompts`` come with the program, so that everything runs
with no network. AdvertiseGen itself is not shipped: point ``dataset:`` at the directory that has
its ``train.json`` and ``dev.json``, or at any file of a known shape (``shapes.py``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

from workloads.base import BadConfiguration, DataMissing
from workloads.data.examples import Example
from workloads.data.hub import hub_records
from workloads.data.records import ENDINGS, Placed, records
from workloads.data.shapes import ANSWER, WHOLE_TEXT, Columns, columns_named, columns_of

__all__ = ["Dataset", "DatasetEntry", "Reading", "find_dataset", "load_dataset", "load_examples"]

Kind = Literal["embedded", "file", "directory", "hub"]

#: How many examples the embedded synthetic set has.
EMBEDDED_SYNTHETIC_COUNT = 1000

#: How many articles the embedded synthetic corpus has.
EMBEDDED_CORPUS_COUNT = 1500

#: How many articles the embedded synthetic set of them has.
EMBEDDED_ARTICLES_COUNT = 100

#: The files of an AdvertiseGen directory, in the order in which they are merged.
ADVERTISEGEN_FILES = ("train.json", "dev.json")

#: Examples that a plan reads of a file.
FIRST_EXAMPLES = 20

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A way to read a dataset, as the settings of a job say it."""

    columns: str = ""  # "": its shape is told by its first example
    split: str = "train"  # of a dataset of the hub
    revision: str = ""  # of a dataset of the hub; "": the newest
    subset: str = ""  # of a dataset of the hub that has several; "": it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """A dataset that exists. ``path`` is None for embedded ones and those of the hub."""

    name: str
    kind: Kind
    path: Path | None
    synthetic: bool
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A dataset that was read: its examples in their order."""

    examples: list[Example]
    synthetic: bool
    learned: str  # what fine-tuning learns of each, as the row says it


EMBEDDED: dict[str, DatasetEntry] = {
    entry.name: entry
    for entry in (
        DatasetEntry(
            name="advertisegen-synthetic",
            kind="embedded",
            path=None,
            synthetic=True,
            description=f"{EMBEDDED_SYNTHETIC_COUNT} made-up Chinese product attribute lists and "
            "advertisements, of AdvertiseGen's shape and lengths",
        ),
        DatasetEntry(
            name="english-prompts",
            kind="embedded",
            path=None,
            synthetic=False,
            description="varied English prompts of 5 to 300 words, written for this project",
        ),
        DatasetEntry(
            name="english-corpus-synthetic",
            kind="embedded",
            path=None,
            synthetic=True,
            description=f"{EMBEDDED_CORPUS_COUNT} made-up English articles, some 370,000 tokens of "
            "tiny-bert, for pretraining",
        ),
        DatasetEntry(
            name="cnn-dailymail-synthetic",
            kind="embedded",
            path=None,
            synthetic=True,
            description=f"{EMBEDDED_ARTICLES_COUNT} made-up English news articles with "
            "highlights, of CNN/DailyMail's shape and lengths",
        ),
        DatasetEntry(
            name="image-prompts",
            kind="embedded",
            path=None,
            synthetic=False,
            description="16 English descriptions of pictures for text-to-image",
        ),
    )
}


def find_dataset(name: str, reading: Reading | None = None) -> DatasetEntry:
    """The dataset of this name or path; reads the first examples of a file at most.

    Args:
        name: an embedded one's, a path, or a hub id.
        reading: with it, the first examples must have the shape that it says; a dataset of the
            hub is not looked at.

    Raises:
        DataMissing: there is no such dataset; the message lists close matches.
        BadConfiguration: the examples have no known shape, or not the one that is named.
    """
    entry = _entry(name)
    if entry.path is None:
        return entry
    first = _first(entry.path, changed_at(name))
    if not first:
        raise _no_examples(name)
    if reading is not None:
        _examples(iter(first), name, reading)
    synthetic = any(isinstance(r, dict) and r.get("synthetic") is True for _, r in first[:1])
    return replace(entry, synthetic=synthetic)


def changed_at(name: str) -> int:
    """Nanoseconds since the epoch at which a dataset's file changed; 0 for what is no file."""
    try:
        return Path(name).expanduser().stat().st_mtime_ns
    except (OSError, ValueError, RuntimeError):
        return 0


@lru_cache(maxsize=8)
def _first(path: Path, _changed_at_ns: int) -> tuple[Placed, ...]:
    """The records that a plan looks at, read once for a dataset's name and for its shape."""
    return tuple(islice(_records(path), FIRST_EXAMPLES))


def _entry(name: str) -> DatasetEntry:
    """The dataset of this name or path, of which nothing is read."""
    if name in EMBEDDED:
        return EMBEDDED[name]
    path = Path(name).expanduser()
    kind: Kind | None = None
    with suppress(OSError, ValueError):  # a name too long for the file system, or with a NUL in it
        kind = "file" if path.is_file() else "directory" if path.is_dir() else None
    if kind is not None:
        return DatasetEntry(name=name, kind=kind, path=path, synthetic=False)
    if _HUB_ID.match(name) and not name.endswith(ENDINGS) and not path.parent.is_dir():
        return DatasetEntry(name=name, kind="hub", path=None, synthetic=False)
    close = difflib.get_close_matches(name, EMBEDDED, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(EMBEDDED)}."
    raise DataMissing(
        f"no dataset {name!r}: neither an embedded one nor a file or directory here. {hint} A path "
        f"may name a file ({', '.join(ENDINGS)}), a directory of them, or one with AdvertiseGen's "
        "train.json and dev.json; org/name is a dataset of the Hugging Face hub."
    )


def load_dataset(name: str, reading: Reading | None = None) -> Dataset:
    """Read a whole dataset; an AdvertiseGen directory's files merged.

    Raises:
        DataMissing: there is no such dataset, it cannot be had, or it holds no examples.
        BadConfiguration: an example has another shape (with file and line), or none is known.
    """
    reading = reading or Reading()
    entry = _entry(name)
    if entry.kind == "embedded":
        embedded = list(_embedded(name))
        return Dataset(
            examples=embedded, synthetic=entry.synthetic, learned=_learned(embedded, ANSWER)
        )
    found = (
        _records(entry.path)
        if entry.path is not None
        else hub_records(name, reading.split, reading.revision, reading.subset)
    )
    examples, columns = _examples(found, name, reading)
    return Dataset(
        examples=examples,
        synthetic=examples[0].synthetic,
        learned=_learned(examples, columns.shape.learned),
    )


def _learned(examples: Sequence[Example], answers: str) -> str:
    """The part of each example that is learned, where ``answers`` names it of one that has an
    answer."""
    without = sum(not example.summary for example in examples)
    if without == len(examples):
        return WHOLE_TEXT
    several = f"; {WHOLE_TEXT} of {without:,} of {len(examples):,} examples, which have no answer"
    return answers + (several if without else "")


def load_examples(name: str, reading: Reading | None = None) -> list[Example]:
    """All examples of a dataset, in a fixed order; see ``load_dataset``."""
    return load_dataset(name, reading).examples


def _examples(
    found: Iterator[Placed], name: str, reading: Reading
) -> tuple[list[Example], Columns]:
    columns = columns_named(reading.columns) if reading.columns else None
    examples = []
    for where, record in found:
        if columns is None:
            columns = columns_of(record, where)
        examples.append(columns.example(record, where))
    if columns is None or not examples:
        raise _no_examples(name)
    return examples, columns


def _no_examples(name: str) -> DataMissing:
    return DataMissing(
        f"{name} holds no examples; expected a JSON object a line, or a table with a line of names"
    )


def _records(path: Path) -> Iterator[Placed]:
    """The records of a file, of AdvertiseGen's files, or of the one kind of file in a directory."""
    if not path.is_dir():
        yield from records(path)
        return
    merged = [path / file for file in ADVERTISEGEN_FILES if (path / file).is_file()]
    for file in merged or _data_files(path):
        yield from records(file)


def _data_files(directory: Path) -> list[Path]:
    try:
        there = sorted(file for file in directory.iterdir() if file.suffix in ENDINGS)
    except OSError as error:
        raise DataMissing(f"cannot read {directory}: {error.strerror or error}") from error
    if not there:
        raise DataMissing(
            f"dataset directory {directory} has neither {' nor '.join(ADVERTISEGEN_FILES)}, nor "
            f"another data file ({', '.join(ENDINGS)})"
        )
    if len({file.suffix for file in there}) > 1:
        names = ", ".join(file.name for file in there[:5])
        raise BadConfiguration(
            f"dataset directory {directory} has files of several kinds ({names}); name one of them"
        )
    return there


@cache
def _embedded(name: str) -> Sequence[Example]:
    """The examples of an embedded dataset, made once for a process: many jobs have the same."""
    if name == "advertisegen-synthetic":
        from workloads.data.synthetic import synthetic_examples

        return synthetic_examples(EMBEDDED_SYNTHETIC_COUNT)
    if name == "english-corpus-synthetic":
        from workloads.data.english_corpus import corpus

        return corpus(EMBEDDED_CORPUS_COUNT)
    if name == "cnn-dailymail-synthetic":
        from workloads.data.articles import article_examples

        return article_examples(EMBEDDED_ARTICLES_COUNT)
    if name == "image-prompts":
        from workloads.data.image_prompts import PROMPTS
    else:
        from workloads.data.english_prompts import PROMPTS

    return [Example(content=prompt) for prompt in PROMPTS]
