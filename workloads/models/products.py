"""Models that jobs keep under a name, for other jobs with ``model: NAME``.

A model is a directory as transformers writes it, with the tokenizer of the model that it was made
from and a note of its origin. The name's directory lies under ``NIGHTGRID_MODELS``, else under
``models`` in the node's cache: **nodes that share neither need NIGHTGRID_MODELS set to a directory
on storage that all of them see.** It is written aside and renamed, so a name that exists is
complete; making the model again replaces it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads.base import DataMissing
from workloads.data.cache import build_aside, cache_root, file_lock, remove_abandoned

if TYPE_CHECKING:
    from workloads.base import Request
    from workloads.models.loading import ModelSource

#: Says of a saved model, an adapter or a calibration what it was made from, and by whom.
ORIGIN = "nightgrid.json"
SAVED_BY, ATTEMPT = "saved_by", "attempt"

#: Files that go with a tokenizer, whatever library wrote them.
_BESIDE_WEIGHTS = frozenset({".json", ".model", ".txt", ".jinja"})
_OF_WEIGHTS = frozenset({"config.json", "generation_config.json", ORIGIN})


#: By kind of product: the variable that names its directory, and its place in the node's cache.
PRODUCT_ROOTS = {
    "model": ("NIGHTGRID_MODELS", "models"),
    "adapter": ("NIGHTGRID_ADAPTERS", "adapters"),
    "calibration": ("NIGHTGRID_CALIBRATIONS", "onnx-calibrations"),
}


def product_root(kind: str) -> Path:
    """The directory of all saved products of a kind on this machine; need not exist."""
    variable, folder = PRODUCT_ROOTS[kind]
    named = os.environ.get(variable)
    return Path(named).expanduser() if named else cache_root() / folder


def find_saved(name: str) -> Path | None:
    """The directory of a saved model of this name; None where there is none."""
    if os.sep in name or name.startswith("."):
        return None
    root = product_root("model")
    directory = root / name
    if not directory.exists() and any(root.glob(f".{glob.escape(name)}.replaced-*")):
        with contextlib.suppress(OSError), file_lock(_lock_of(directory)):
            remove_abandoned(directory)  # whoever replaced it was killed in between
    return directory if (directory / "config.json").is_file() else None


def origin_of(directory: Path) -> dict[str, Any]:
    """The note that was kept with a saved model; empty for any other directory."""
    try:
        note = json.loads((directory / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def origin_by(request: Request) -> dict[str, Any]:
    """The beginning of a product's note: the model it is made from, and the run, the job and the
    attempt that save it, where a run is known."""
    saver = {SAVED_BY: request.saved_by, ATTEMPT: request.attempt} if request.saved_by else {}
    return {"model": request.model, **saver}


def save_trained(
    model: Any,
    source: ModelSource,
    name: str,
    origin: Mapping[str, Any],
    *,
    written: Path | None = None,
) -> Path:
    """Keep a model that was made from another one under a name; ``origin`` says how.

    Args:
        written: a directory in which the model lies already, as its library has written it.

    Raises:
        DataMissing: the directory cannot be written to.
    """

    def fill(directory: Path) -> None:
        if source.random_weights:
            model.config.random_weights = True  # a little training makes no sense of them
        if written is None:
            model.save_pretrained(directory, safe_serialization=True)
        else:
            shutil.copytree(written, directory, dirs_exist_ok=True)
            if source.random_weights:
                _mark_random(directory / "config.json")
        copy_tokenizer(Path(source.tokenizer_path), directory)
        write_origin(directory, origin)

    return keep("model", product_root("model") / name, fill)


def _mark_random(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    text = json.dumps({**config, "random_weights": True}, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def keep(what: str, final: Path, fill: Callable[[Path], None]) -> Path:
    """Write a named directory in one step; one of that name is replaced.

    Raises:
        DataMissing: it cannot be written.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(_lock_of(final)):
            remove_abandoned(final)
            build_aside(final, fill, replace=True)
    except OSError as error:
        raise DataMissing(f"the {what} cannot be kept in {final}: {error}") from error
    return final


def _lock_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


def write_origin(directory: Path, origin: Mapping[str, Any]) -> None:
    """Write the note that says what a directory's model or adapter was made from."""
    text = json.dumps(dict(origin), indent=2, ensure_ascii=False)
    (directory / ORIGIN).write_text(text + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files beside a model's weights that a tokenizer may be made of."""
    for file in sorted(source.iterdir()):
        of_weights = file.name in _OF_WEIGHTS or file.name.endswith(".index.json")
        if file.suffix in _BESIDE_WEIGHTS and not of_weights and file.is_file():
            shutil.copyfile(file, target / file.name)


# Products that jobs keep under a name for others: models, adapters, calibrations. No torch here.
#
# A name may come to stand for something else, when a job saves it anew. What was loaded or measured
# before that is of another product. The note beside a product tells by identity, not by moments,
# which clocks and copies make wrong: a training of hours would be run again.


class Saving(NamedTuple):
    """The attempt that saved what has a name now; empty where its note does not say."""

    saved_by: str = ""  # ids of the run and the job (``Request.saved_by``)
    attempt: int = 0  # its number; 0 in notes of earlier versions

    @property
    def identity(self) -> str:
        """No two savings have the same; "" where it is not known."""
        return f"{self.saved_by}-{self.attempt}" if self.saved_by and self.attempt else ""


def saving_of(kind: str, name: object) -> Saving:
    """The saving of what has a name now, as far as anything of it is known on this machine."""
    if kind not in PRODUCT_ROOTS or not isinstance(name, str):
        return Saving()
    note = origin_of(product_root(kind) / Path(name).expanduser())
    attempt = note.get(ATTEMPT)
    return Saving(str(note.get(SAVED_BY, "")), attempt if isinstance(attempt, int) else 0)
