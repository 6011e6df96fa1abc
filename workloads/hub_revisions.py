"""Revisions of repositories of the Hugging Face hub, brought to commits.

A branch moves, and what was measured then would not be what its name means now. So a plan writes a
model of the hub as ``org/name@COMMIT`` and a dataset's ``revision`` as a commit: it enters the
job's identity and its row, and every node loads the same files. A commit is looked up nowhere; a
branch or tag is asked of the hub, and of the local cache where that is not to be asked or does not
answer. A run keeps the commits that it came to, for when it is gone on with (``Revisions``).
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workloads import files
from workloads.base import DataMissing
from workloads.models import hub

Kind = Literal["models", "datasets"]

MAIN = "main"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,128})?")


def is_hub_id(name: str) -> bool:
    """Tell if a name can be that of a repository, with or without a revision."""
    return _HUB_ID.fullmatch(name) is not None


@dataclass(slots=True)
class Revisions:
    """The commits that one reading of a grid comes to.

    Attributes:
        commits: by ``KIND/REPOSITORY@REVISION``; those that are here beforehand, of the run that is
            gone on with, are asked of nobody.
        notes: what a reader should know of them.
    """

    commits: dict[str, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def of(self, kind: Kind, repository: str, revision: str) -> str:
        """``commit_of``, once."""
        if hub.COMMIT.fullmatch(revision):
            return revision
        key = f"{kind}/{repository}@{revision or MAIN}"
        if key not in self.commits:
            self.commits[key] = commit_of(kind, repository, revision, self._note)
        return self.commits[key]

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def model(self, name: str) -> str:
        """``pinned_model`` with these commits."""
        return pinned_model(name, self)

    def dataset(self, name: str, revision: str) -> str:
        """``pinned_revision`` with these commits."""
        return pinned_revision(name, revision, self)


def pinned_model(name: str, known: Revisions | None = None) -> str:
    """``org/name`` or ``org/name@REVISION`` with the commit that it means now, or that is
    ``known``; another name of a model, that of a directory that is here among them, as it is.

    Raises:
        DataMissing: neither the hub nor the local cache knows it.
    """
    if not is_hub_id(name) or os.path.exists(Path(name).expanduser()):
        return name
    repository, revision = hub.split(name)
    return f"{repository}@{(known or Revisions()).of('models', repository, revision)}"


def pinned_revision(dataset: str, revision: str, known: Revisions | None = None) -> str:
    """The commit that a revision of a dataset of the hub means now; that of another dataset as it
    is.

    Raises:
        DataMissing: neither the hub nor the local cache knows it.
    """
    from workloads.data.catalog import find_dataset

    if not is_hub_id(dataset) or find_dataset(dataset).kind != "hub":
        return revision
    return (known or Revisions()).of("datasets", dataset, revision)


def commit_of(
    kind: Kind, repository: str, revision: str, note: Callable[[str], None] = lambda _: None
) -> str:
    """The commit of a branch, a tag or a commit; "" is the main branch. ``note`` is told where the
    hub refused to answer and the local cache did instead.

    Raises:
        DataMissing: neither the hub nor the local cache knows it.
    """
    if hub.COMMIT.fullmatch(revision):
        return revision
    what = f"{repository}@{revision}" if revision else repository
    if hub.offline():
        why = "HF_HUB_OFFLINE is set"
    else:
        quoted = urllib.parse.quote(revision or MAIN, safe="")
        # Without `expand` the answer lists every file, which is megabytes for some repositories.
        url = f"{hub.endpoint()}/api/{kind}/{repository}/revision/{quoted}?expand=sha"
        answer = hub.configuration_at(url, os.environ.get("HF_TOKEN"))
        if isinstance(answer, dict) and hub.COMMIT.fullmatch(str(answer.get("sha", ""))):
            return str(answer["sha"])
        said = "answers without a commit" if isinstance(answer, dict) else answer
        if said == hub.NO_CONFIG:
            raise DataMissing(
                f"{what}: {hub.endpoint()} has no {kind[:-1]} of this name and revision"
            )
        why = f"{hub.endpoint()} {said}"
    cached = next(_cached(kind, repository, revision), None)
    if cached is None:
        raise DataMissing(f"{what} is not in the local cache ({hub.cache_directory()}), and {why}")
    if not hub.offline():
        note(f"{what} is {cached[:7]} by the local cache, since {why}")
    return cached


def _cached(kind: Kind, repository: str, revision: str) -> Iterator[str]:
    """Commits of the local cache that a revision may mean, the likeliest first."""
    folder = hub.cache_directory() / f"{kind}--{repository.replace('/', '--')}"
    snapshots = folder / "snapshots"
    named = folder / "refs" / (revision or MAIN)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        yield files.read_text(named, limit_bytes=4096).strip()
    if revision:
        if (snapshots / revision).is_dir():
            yield revision
        return
    if kind == "models" and (snapshot := hub.cached_snapshot(repository)) is not None:
        yield snapshot.name
    # A dataset that was fetched by its commit leaves no reference.
    for path in sorted(snapshots.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True):
        yield path.name
