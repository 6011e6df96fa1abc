"""Datasets by name: the embedded ones, JSON-lines files, and AdvertiseGen directories.

``advertisegen-synthetic`` and ``english-prompts`` come with the program, so that everything runs
with no network. AdvertiseGen itself is not shipped: point ``dataset:`` at the directory that has
its ``train.json`` and ``dev.json``, or at any file of the same shape.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workloads.data.examples import Example, is_synthetic_file, read_json_lines
from workloads.errors import DataMissing

__all__ = ["DatasetEntry", "Example", "find_dataset", "load_examples"]

Kind = Literal["embedded", "file", "directory"]

#: How many examples the embedded synthetic set has.
EMBEDDED_SYNTHETIC_COUNT = 1000

#: The files of an AdvertiseGen directory, in the order in which they are merged.
ADVERTISEGEN_FILES = ("train.json", "dev.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """A dataset that exists. ``path`` is None for embedded ones."""

    name: str
    kind: Kind
    path: Path | None
    synthetic: bool
    description: str = ""


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
    )
}


def find_dataset(name: str) -> DatasetEntry:
    """The dataset of this name or path; reads one line of a file at most.

    Raises:
        DataMissing: there is no such dataset; the message lists close matches.
    """
    if name in EMBEDDED:
        return EMBEDDED[name]
    path = Path(name).expanduser()
    try:
        if path.is_file():
            return DatasetEntry(
                name=name, kind="file", path=path, synthetic=is_synthetic_file(path)
            )
        if path.is_dir():
            return _directory(name, path)
    except (OSError, ValueError):  # a name too long for the file system, or with a NUL in it
        pass
    close = difflib.get_close_matches(name, EMBEDDED, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(EMBEDDED)}."
    raise DataMissing(
        f"no dataset {name!r}: neither an embedded one nor a file or directory here. {hint} "
        'A path may name a JSON-lines file of {"content", "summary"} objects, or a directory with '
        "AdvertiseGen's train.json and dev.json."
    )


def _directory(name: str, path: Path) -> DatasetEntry:
    files = [file for file in ADVERTISEGEN_FILES if (path / file).is_file()]
    if not files:
        raise DataMissing(
            f"dataset directory {path} has neither {' nor '.join(ADVERTISEGEN_FILES)}"
        )
    synthetic = any(is_synthetic_file(path / file) for file in files)
    return DatasetEntry(name=name, kind="directory", path=path, synthetic=synthetic)


def load_examples(name: str) -> list[Example]:
    """All examples of a dataset, in a fixed order; an AdvertiseGen directory's files merged.

    Raises:
        DataMissing: no such dataset, or a malformed line (with file and line).
    """
    entry = find_dataset(name)
    if entry.kind == "embedded":
        return _embedded(entry.name)
    assert entry.path is not None
    if entry.kind == "file":
        return read_json_lines(entry.path)
    files = [entry.path / file for file in ADVERTISEGEN_FILES]
    return [example for file in files if file.is_file() for example in read_json_lines(file)]


def _embedded(name: str) -> list[Example]:
    if name == "advertisegen-synthetic":
        from workloads.data.synthetic import synthetic_examples

        return synthetic_examples(EMBEDDED_SYNTHETIC_COUNT)
    from workloads.data.english_prompts import PROMPTS

    return [Example(content=prompt) for prompt in PROMPTS]
