"""Ask the Hugging Face hub for models in a way that cannot hang a plan.

The local cache is looked at first, by its layout on disk, so neither torch nor the hub's client is
imported. Only for a model that is not there is the network asked, once per process, with a
deadline that covers name resolution too (which has no time-out of its own).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from workloads import files
from workloads.base import DataMissing
from workloads.models.checkpoint_files import read_pipeline_index, weight_files
from workloads.models.checkpoint_kind import PIPELINE_INDEX

DEADLINE_S = 4.0
LONGEST_BYTES = 1 << 20
_TRUE = {"1", "true", "yes", "on"}
NO_CONFIG = "has no such model (or it has no config.json)"
COMMIT = re.compile(r"[0-9a-f]{40}")


def offline() -> bool:
    """Tell if the user told the Hugging Face libraries to stay off the network."""
    return any(
        os.environ.get(name, "").lower() in _TRUE
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def cache_directory() -> Path:
    """The hub's cache, as its client finds it."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def endpoint() -> str:
    """The address of the hub."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def split(model_id: str) -> tuple[str, str]:
    """The repository and the revision of ``org/name@revision``; "" where it names none."""
    repository, _, revision = model_id.partition("@")
    return repository, revision


def cached_snapshot(model_id: str) -> Path | None:
    """The complete snapshot of a model in the local cache, that of its revision if it names one; or
    None."""
    repository, revision = split(model_id)
    folder = cache_directory() / f"models--{repository.replace('/', '--')}"
    names = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        names = [files.read_text(folder / "refs" / (revision or "main"), limit_bytes=4096).strip()]
    if revision:
        names.append(revision)
    else:
        names += sorted(p.name for p in (folder / "snapshots").glob("*") if p.name not in names)
    for name in names:
        snapshot = folder / "snapshots" / name
        try:
            if _pipeline_is_whole(snapshot):
                return snapshot
            if (snapshot / "config.json").is_file():
                weight_files(snapshot)
                return snapshot
        except DataMissing:
            continue  # an interrupted download
    return None


def _pipeline_is_whole(snapshot: Path) -> bool:
    """Tell if a directory has a pipeline's index, and weights of each model that it names."""
    index = read_pipeline_index(snapshot)
    if index is None:
        return False
    for part, of in index.items():
        if isinstance(of, list) and of[-1] and (snapshot / part / "config.json").is_file():
            found = [*(snapshot / part).glob("*.safetensors"), *(snapshot / part).glob("*.bin")]
            if not found:
                return False
    return True


def fetch_config(model_id: str) -> dict[str, Any]:
    """config.json of a model on the hub; of a pipeline of several models its model_index.json.

    Raises:
        DataMissing: the hub is not to be asked, not reachable in time, or does not have it.
    """
    if offline():
        raise DataMissing(
            f"{model_id} is not in the local cache ({cache_directory()}) and HF_HUB_OFFLINE is set"
        )
    repository, revision = split(model_id)
    at, token = (
        f"{endpoint()}/{repository}/resolve/{revision or 'main'}",
        os.environ.get("HF_TOKEN"),
    )
    outcome = configuration_at(f"{at}/config.json", token)
    if outcome == NO_CONFIG:
        pipeline = configuration_at(f"{at}/{PIPELINE_INDEX}", token)
        outcome = outcome if isinstance(pipeline, str) else pipeline
    if isinstance(outcome, str):
        raise DataMissing(f"{model_id} is not in the local cache, and {endpoint()} {outcome}")
    _fetched[model_id] = outcome
    return outcome


#: By model id; a hub is asked where a name is checked, and what it said is known from then on.
_fetched: dict[str, dict[str, Any]] = {}


def fetched_config(model_id: str) -> dict[str, Any] | None:
    """config.json of a model, if ``fetch_config`` had it in this process; nobody is asked."""
    return _fetched.get(model_id)


@functools.lru_cache(maxsize=256)
def configuration_at(url: str, token: str | None) -> dict[str, Any] | str:
    """The JSON object at ``url``, or why there is none."""
    import urllib.error  # here, since most plans ask no hub
    import urllib.request

    answer: list[dict[str, Any] | str] = []

    def ask() -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "nightgrid"})
        if token:
            # Unredirected: the hub forwards to a file store that must not see the token.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                text = response.read(LONGEST_BYTES + 1)
            if len(text) > LONGEST_BYTES:
                answer.append(f"answers with more than {LONGEST_BYTES >> 20} MiB")
                return
            found = json.loads(text)
            answer.append(found if isinstance(found, dict) else "has no usable config.json")
        except urllib.error.HTTPError as error:
            answer.append(_meaning(error.code))
        except (OSError, ValueError) as error:
            answer.append(f"cannot be reached ({getattr(error, 'reason', None) or error})")

    thread = threading.Thread(target=ask, daemon=True, name="hub")
    thread.start()
    thread.join(DEADLINE_S)
    return answer[0] if answer else f"did not answer within {DEADLINE_S:.0f} s"


def _meaning(code: int) -> str:
    if code in (401, 403):
        return f"answers {code}: no such model, or it needs access (set HF_TOKEN)"
    if code == 404:
        return NO_CONFIG
    return f"answers with HTTP {code}"


def download(model_id: str, *, with_code: bool = False, pipeline: bool = False) -> Path:
    """Fetch a model's snapshot into the hub's cache; its Python files only ``with_code``. Of a
    ``pipeline`` only the files that it is loaded from: repositories have each model several times.

    Raises:
        DataMissing: it cannot be fetched; carries the client's words.
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
    except Exception as error:  # the client has no one base class over all of 0.36 to 1.x
        raise DataMissing(f"{model_id} cannot be fetched from the hub: {error}") from error
    return Path(path)
