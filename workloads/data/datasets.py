"""Datasets by name: the embedded ones, files, directories, and those of the Hugging Face hub.

``advertisegen-synthetic`` and ``english-prompts`` come with the program, so that everything runs
with no network. AdvertiseGen itself is not shipped: point ``dataset:`` at the directory that has
its ``train.json`` and ``dev.json``, or at any file of a known shape (``shapes.py``).
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from workloads.base import BadConfiguration, DataMissing, JobDescription, Refusal
from workloads.data.embedded import (
    ENGLISH_PROMPTS,
    IMAGE_PROMPTS,
    english_articles,
    news_examples,
    synthetic_examples,
)
from workloads.data.shapes import (
    ANSWER,
    WHOLE_TEXT,
    BadExample,
    Columns,
    Example,
    columns_named,
    columns_of,
)
from workloads.settings import WorkloadParameters, setting
from workloads.util import files

# Records of dataset files: JSON lines, a JSON list, CSV, TSV and Parquet; and of the hub.
#
# A malformed record is an error that names file and line or record, since one that is skipped in
# silence would make two runs on "the same" data differ.

#: Lines longer than this many bytes are refused: no example is; a wrong file may be.
MAX_LINE_BYTES = 16 * 1024 * 1024
#: A JSON list is read at once.
MAX_LIST_BYTES = 2 * 1024**3
TABLES = {".csv": ",", ".tsv": "\t"}
#: Endings of files that are data, where a directory or a name has to be told from others.
ENDINGS = (".json", ".jsonl", ".parquet", *TABLES)

#: A record with its place, for messages.
Placed = tuple[str, Any]


def records(path: Path) -> Iterator[Placed]:
    """The records of a file, in order.

    Raises:
        DataMissing: it cannot be read.
        BadExample: a line is no JSON; the table has no columns.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix in TABLES:
            yield from _table(path)
        elif (first := _first_character(path)) == b"[":
            yield from _json_list(path)
        elif first in (b"{", b"") or path.suffix in ENDINGS:
            yield from _json_lines(path)
        else:
            raise BadExample(
                f"{path}: its name ends in none of {', '.join(ENDINGS)}, and it is no JSON"
            )
    except OSError as error:
        raise DataMissing(f"cannot read {path}: {error.strerror or error}") from error


def _json_lines(path: Path) -> Iterator[Placed]:
    with files.opened(path) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise BadExample(f"{where}: line longer than {MAX_LINE_BYTES:,} bytes")
            if line.strip():
                yield where, _json(line, where)


def _json_list(path: Path) -> Iterator[Placed]:
    content = _json(files.read_bytes(path, limit_bytes=MAX_LIST_BYTES), str(path))
    for number, record in enumerate(content, 1):
        yield f"{path}: example {number}", record


def _json(text: bytes, where: str) -> Any:
    wanted = 'one JSON object a line is expected, such as {"content": "…", "summary": "…"}'
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadExample(f"{where}: not UTF-8 (byte {error.start + 1}); {wanted}") from error
    except (ValueError, RecursionError) as error:
        message = str(error)
        if isinstance(error, json.JSONDecodeError) and error.lineno == 1:
            message = f"{error.msg}, column {error.colno}"
        raise BadExample(f"{where}: not JSON ({message}); {wanted}") from error


def _first_character(path: Path) -> bytes:
    with files.opened(path) as content:
        return content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    from pyarrow import parquet

    try:
        with files.opened(path) as content, parquet.ParquetFile(content) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", record
    except pyarrow.ArrowException as error:
        raise BadExample(f"{path}: no Parquet file: {error}") from error


def _table(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with (
        files.opened(path) as content,
        io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text,
    ):
        comma = TABLES[path.suffix]
        table = csv.DictReader(text, delimiter=comma, strict=True)
        try:
            names = table.fieldnames or ()
            if len(names) == 1 and (other := next((c for c in ";\t,|" if c in names[0]), "")):
                raise BadExample(
                    f"{path}:1: the columns are divided by {other!r}; {path.suffix} wants {comma!r}"
                )
            for record in table:
                where = f"{path}:{table.line_num}"
                if None in record or None in record.values():
                    columns = ", ".join(table.fieldnames or ())
                    raise BadExample(f"{where}: not one value for each of the columns {columns}")
                yield where, record
        except (csv.Error, UnicodeDecodeError) as error:
            message = f"{path}:{table.line_num + 1}: {error}"
            if "unexpected end" in str(error):
                message += (
                    '; a field that begins with " ends with one, and "" stands for one inside'
                )
            raise BadExample(message) from error


# Records of a dataset of the Hugging Face hub, through its own library.


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
    placed_records = (
        _records(entry.path)
        if entry.path is not None
        else hub_records(name, reading.split, reading.revision, reading.subset)
    )
    examples, columns = _examples(placed_records, name, reading)
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
    placed_records: Iterator[Placed], name: str, reading: Reading
) -> tuple[list[Example], Columns]:
    columns = columns_named(reading.columns) if reading.columns else None
    examples = []
    for where, record in placed_records:
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
        return synthetic_examples(EMBEDDED_SYNTHETIC_COUNT)
    if name == "english-corpus-synthetic":
        return english_articles(EMBEDDED_CORPUS_COUNT)
    if name == "cnn-dailymail-synthetic":
        return news_examples(EMBEDDED_ARTICLES_COUNT)
    prompts = IMAGE_PROMPTS if name == "image-prompts" else ENGLISH_PROMPTS
    return [Example(content=prompt) for prompt in prompts]


# Parameters of workloads that read a dataset, and the rules that jobs with one must pass.

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


def dataset_refusals(job: JobDescription) -> tuple[Refusal, ...]:
    """A dataset that no node could read as it is asked for; one that is not here is not judged."""
    for name, value in job.parameters.items():
        if value not in (_OF_THE_HUB.get(name, value), "") and not _is_of_the_hub(job.dataset):
            reason = f"{job.dataset} is no dataset of the hub, which alone has a {name}"
            return (
                Refusal(setting=name, reason=reason, hint="leave it out; name the file to read"),
            )
    columns = str(job.parameters.get("columns") or "")
    message = _objection(job.dataset, columns, changed_at(job.dataset))
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
