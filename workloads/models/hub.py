"""Query the Hugging Face hub without hanging a plan.

The local cache is read first, by its layout on disk, without torch or the hub's client. The network
is queried only for missing models, once per process, with a deadline that includes name resolution
(which has no timeout of its own).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from workloads.base import DataMissing
from workloads.data.datasets import find_dataset
from workloads.inspection.checkpoints import PIPELINE_INDEX, read_object, weight_files
from workloads.util import files

DEADLINE_S = 4.0
LONGEST_BYTES = 1 << 20
_TRUE = {"1", "true", "yes", "on"}
NO_CONFIG = "has no such model (or it has no config.json)"
COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"

Kind = Literal["models", "datasets"]


def offline() -> bool:
    """Tell if the user keeps the Hugging Face libraries off the network."""
    return any(
        os.environ.get(name, "").lower() in _TRUE
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def cache_directory() -> Path:
    """Return the hub's cache directory, by its client's rules."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def endpoint() -> str:
    """Return the hub's address."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def split(model_id: str) -> tuple[str, str]:
    """Split ``org/name@revision`` into repository and revision ("" if none)."""
    repository, _, revision = model_id.partition("@")
    return repository, revision


def cached_snapshot(model_id: str) -> Path | None:
    """Return a model's complete snapshot in the local cache, of its revision if named; or None."""
    for snapshot in _snapshots("models", *split(model_id)):
        try:
            if _pipeline_is_whole(snapshot):
                return snapshot
            if (snapshot / "config.json").is_file():
                weight_files(snapshot)
                return snapshot
        except DataMissing:
            continue  # an interrupted download
    return None


def _snapshots(kind: Kind, repository: str, revision: str) -> Iterator[Path]:
    """Yield directories of the local cache that a revision may mean, named by their commits, the
    likeliest first."""
    folder = cache_directory() / f"{kind}--{repository.replace('/', '--')}"
    snapshots = folder / "snapshots"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        commit = files.read_text(folder / "refs" / (revision or MAIN), limit_bytes=4096)
        yield snapshots / commit.strip()
    for path in sorted(snapshots.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True):
        # Snapshots fetched by commit have no reference.
        if revision in ("", path.name):
            yield path


def _pipeline_is_whole(snapshot: Path) -> bool:
    """Tell if a directory has a pipeline's index and the weights of all its models."""
    index = read_object(snapshot / PIPELINE_INDEX)
    if index is None:
        return False
    for part, of in index.items():
        if isinstance(of, list) and of[-1] and (snapshot / part / "config.json").is_file():
            weights = [*(snapshot / part).glob("*.safetensors"), *(snapshot / part).glob("*.bin")]
            if not weights:
                return False
    return True


def fetch_config(model_id: str) -> dict[str, Any]:
    """Return config.json or a pipeline's model_index.json from the hub; raises DataMissing."""
    if offline():
        raise DataMissing(
            f"{model_id} is not in the local cache ({cache_directory()}) and HF_HUB_OFFLINE is set"
        )
    repository, revision = split(model_id)
    at = f"{endpoint()}/{repository}/resolve/{revision or MAIN}"
    token = os.environ.get("HF_TOKEN")
    outcome = configuration_at(f"{at}/config.json", token)
    if outcome == NO_CONFIG:
        pipeline = configuration_at(f"{at}/{PIPELINE_INDEX}", token)
        outcome = outcome if isinstance(pipeline, str) else pipeline
    if isinstance(outcome, str):
        raise DataMissing(f"{model_id} is not in the local cache, and {endpoint()} {outcome}")
    return outcome


@functools.lru_cache(maxsize=256)
def configuration_at(url: str, token: str | None) -> dict[str, Any] | str:
    """Return the JSON object at ``url``, or why there is none."""
    import urllib.error  # lazy: most plans query no hub
    import urllib.request

    answer: list[dict[str, Any] | str] = []

    def ask() -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "nightgrid"})
        if token:
            # Unredirected: the file store that the hub forwards to must not see the token.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                text = response.read(LONGEST_BYTES + 1)
            if len(text) > LONGEST_BYTES:
                answer.append(f"answers with more than {LONGEST_BYTES >> 20} MiB")
                return
            content = json.loads(text)
            answer.append(content if isinstance(content, dict) else "has no usable config.json")
        except urllib.error.HTTPError as error:
            answer.append(
                _MEANINGS.get(error.code, f"answers with HTTP {error.code}") + _proxy(url)
            )
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "reason", None) or error
            answer.append(f"cannot be reached ({why}){_proxy(url)}")

    thread = threading.Thread(target=ask, daemon=True, name="hub")
    thread.start()
    thread.join(DEADLINE_S)
    return answer[0] if answer else f"did not answer within {DEADLINE_S:.0f} s"


#: Statuses of HTTP in words.
_MEANINGS = {
    407: "was not asked: 407, the proxy wants a user and password in its variable",
    401: "answers 401: no such model, or it needs access (set HF_TOKEN)",
    403: "answers 403: no such model, or it needs access (set HF_TOKEN)",
    404: NO_CONFIG,
}


def _proxy(url: str) -> str:
    """Name the proxy that answered or failed instead of ``url``, if there is one."""
    import urllib.request

    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.netloc):
        return ""
    where = proxy.rpartition("@")[2]
    return f" by way of the proxy {where}; without it: no_proxy={parts.hostname}"


def download(model_id: str, *, with_code: bool = False, pipeline: bool = False) -> Path:
    """Fetch a model's snapshot; raises DataMissing.

    Python files only ``with_code``; of a ``pipeline`` only the variant that is loaded.
    """
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    if with_code:
        patterns.append("*.py")
    try:
        repository, revision = split(model_id)
        which: dict[str, Any] = {"revision": revision or None, "cache_dir": cache_directory()}
        if pipeline:
            from diffusers import DiffusionPipeline

            return Path(DiffusionPipeline.download(repository, **which))
        which |= {"endpoint": endpoint()}
        path = snapshot_download(repository, allow_patterns=patterns, **which)
        if not any(Path(path).glob("*.safetensors")):
            path = snapshot_download(repository, allow_patterns=["*.bin"], **which)
    except Exception as error:  # no common base class over clients 0.36 to 1.x
        raise DataMissing(f"{model_id} cannot be fetched from the hub: {error}") from error
    return Path(path)


# Hub revisions, resolved to commits, so that a name keeps its meaning when branches move.
#
# Plans write models as ``org/name@COMMIT`` and a dataset's ``revision`` as a commit: part of the
# job's identity and row. The hub resolves them, or offline the local cache; runs store the result.

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,128})?")


def is_hub_id(name: str) -> bool:
    """Tell if a name may be a repository's, with or without a revision."""
    return _HUB_ID.fullmatch(name) is not None


@dataclass(slots=True)
class Revisions:
    """Commits resolved while reading a grid."""

    #: By ``KIND/REPOSITORY@REVISION``; those of a resumed run are given beforehand.
    commits: dict[str, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # remarks for the reader, in order

    def of(self, kind: Kind, repository: str, revision: str) -> str:
        """Resolve a branch, tag or commit once; "" is main. Raises DataMissing if unknown."""
        if COMMIT.fullmatch(revision):
            return revision
        key = f"{kind}/{repository}@{revision or MAIN}"
        if key in self.commits:
            return self.commits[key]
        what = f"{repository}@{revision}" if revision else repository
        if offline():
            why = "HF_HUB_OFFLINE is set"
        else:
            quoted = urllib.parse.quote(revision or MAIN, safe="")
            # Without `expand` the response lists every file: megabytes for some repositories.
            url = f"{endpoint()}/api/{kind}/{repository}/revision/{quoted}?expand=sha"
            answer = configuration_at(url, os.environ.get("HF_TOKEN"))
            if isinstance(answer, dict) and COMMIT.fullmatch(str(answer.get("sha", ""))):
                self.commits[key] = str(answer["sha"])
                return self.commits[key]
            if answer == NO_CONFIG:
                raise DataMissing(
                    f"{what}: {endpoint()} has no {kind[:-1]} of this name and revision"
                )
            answered = "answers without a commit" if isinstance(answer, dict) else answer
            why = f"{endpoint()} {answered}"
        cached = next(_snapshots(kind, repository, revision), None)
        if cached is None:
            raise DataMissing(f"{what} is not in the local cache ({cache_directory()}), and {why}")
        if not offline():
            self.notes[f"{what} is {cached.name[:7]} by the local cache, since {why}"] = None
        self.commits[key] = cached.name
        return cached.name

    def model(self, name: str) -> str:
        """Pin ``org/name[@REVISION]`` to its commit; keep other names. Raises as ``of``."""
        if not is_hub_id(name) or os.path.exists(Path(name).expanduser()):
            return name
        repository, revision = split(name)
        return f"{repository}@{self._of_name('models', repository, revision)}"

    def dataset(self, name: str, revision: str) -> str:
        """Resolve a hub dataset's revision; keep those of others. Raises as ``of``."""
        if not is_hub_id(name) or find_dataset(name).kind != "hub":
            return revision
        return self._of_name("datasets", name, revision)

    def _of_name(self, kind: Kind, repository: str, revision: str) -> str:
        """Resolve what may have been meant as a path; raises as ``of``."""
        try:
            return self.of(kind, repository, revision)
        except DataMissing as error:
            raise DataMissing(f"{error}; if a path was meant, there is no such path") from error
