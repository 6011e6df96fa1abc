"""Revisions of repositories of the Hugging Face hub, brought to commits.

A branch moves, and what was measured then would not be what its name means now. So a plan writes a
model of the hub as ``org/name@COMMIT`` and a dataset's ``revision`` as a commit: it enters the
job's identity and its row, and every node loads the same files. A commit is looked up nowhere; a
branch or tag is asked of the hub, and of the local cache where that is not to be asked or reached.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from workloads import files
from workloads.errors import DataMissing
from workloads.models import hub

Kind = Literal["models", "datasets"]

MAIN = "main"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,128})?")


def is_hub_id(name: str) -> bool:
    """Tell if a name can be that of a repository, with or without a revision."""
    return _HUB_ID.fullmatch(name) is not None


def pinned_model(name: str) -> str:
    """``org/name`` or ``org/name@REVISION`` with the commit that it means now; another name of a
    model, that of a directory that is here among them, as it is.

    Raises:
        DataMissing: neither the hub nor the local cache knows it.
    """
    if not is_hub_id(name) or os.path.exists(Path(name).expanduser()):
        return name
    repository, revision = hub.split(name)
    return f"{repository}@{commit_of('models', repository, revision)}"


def pinned_revision(dataset: str, revision: str) -> str:
    """The commit that a revision of a dataset of the hub means now; that of another dataset as it
    is.

    Raises:
        DataMissing: neither the hub nor the local cache knows it.
    """
    from workloads.data.catalog import find_dataset

    if not is_hub_id(dataset) or find_dataset(dataset).kind != "hub":
        return revision
    return commit_of("datasets", dataset, revision)


def commit_of(kind: Kind, repository: str, revision: str) -> str:
    """The commit of a branch, a tag or a commit; "" is the main branch.

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
        if isinstance(answer, dict) or not answer.startswith(hub.UNREACHED):
            said = "answers without a commit" if isinstance(answer, dict) else answer
            said = said.replace(hub.NO_CONFIG, f"has no {kind[:-1]} of this name and revision")
            raise DataMissing(f"{what}: {hub.endpoint()} {said}")
        why = f"{hub.endpoint()} {answer}"
    cached = next(_cached(kind, repository, revision), None)
    if cached is None:
        raise DataMissing(f"{what} is not in the local cache ({hub.cache_directory()}), and {why}")
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
