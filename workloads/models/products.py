"""Products that jobs save under a name for other jobs: models, adapters, calibrations. No torch.

They lie under ``NIGHTGRID_MODELS`` (``_ADAPTERS``, ``_CALIBRATIONS``), else in the node's cache:
**nodes without shared storage need the variable set to a directory that all of them see.** Written
aside and renamed, so a name that exists is complete; saving again replaces it. A note of the origin
identifies the saving attempt, by ids rather than times, which clocks and copies distort.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads.base import DataMissing
from workloads.data.cache import build_aside, cache_root, file_lock, remove_abandoned
from workloads.inspection.checkpoints import side_files
from workloads.models.embedded import write_files
from workloads.util import files
from workloads.util.contents import identity_of

if TYPE_CHECKING:
    from workloads.base import Request
    from workloads.models.loading import ModelSource

#: File name of a product's note of origin.
ORIGIN = "nightgrid.json"
SAVED_BY, ATTEMPT = "saved_by", "attempt"
#: File name of a calibration's ranges.
RANGES = "ranges.json"

#: Kind of product -> (variable of its directory, place in the node's cache).
PRODUCT_ROOTS = {
    "model": ("NIGHTGRID_MODELS", "models"),
    "adapter": ("NIGHTGRID_ADAPTERS", "adapters"),
    "calibration": ("NIGHTGRID_CALIBRATIONS", "onnx-calibrations"),
}


def product_root(kind: str) -> Path:
    """Return the directory of all saved products of a kind; it need not exist."""
    variable, folder = PRODUCT_ROOTS[kind]
    named = os.environ.get(variable)
    return Path(named).expanduser() if named else cache_root() / folder


def find_saved(name: str) -> Path | None:
    """Return the directory of a saved model; None if there is none."""
    if os.sep in name or name.startswith("."):
        return None
    root = product_root("model")
    directory = root / name
    if not directory.exists() and any(root.glob(f".{glob.escape(name)}.replaced-*")):
        with contextlib.suppress(OSError), file_lock(_lock_of(directory)):
            remove_abandoned(directory)  # a replacement was interrupted
    return directory if (directory / "config.json").is_file() else None


def save_product(
    kind: str, name: str, origin: Mapping[str, Any], fill: Callable[[Path], object]
) -> Path:
    """Write a named product's directory atomically, replacing one of that name.

    ``fill`` writes all but the note ``origin``. Raises DataMissing if it cannot be written.
    """
    final = product_root(kind) / name

    def fill_all(directory: Path) -> None:
        fill(directory)
        write_origin(directory, origin)

    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(_lock_of(final)):
            remove_abandoned(final)
            build_aside(final, fill_all, replace=True)
    except OSError as error:
        raise DataMissing(f"the {kind} cannot be kept in {final}: {error}") from error
    return final


def _lock_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


def save_trained(
    model: Any,
    source: ModelSource,
    name: str,
    origin: Mapping[str, Any],
    *,
    written: Path | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """Save a model derived from ``source`` (in ``written`` already, if set) with its tokenizer, and
    further files ``beside`` them."""

    def fill(directory: Path) -> None:
        if written is None:
            model.save_pretrained(directory, safe_serialization=True)
        else:
            shutil.copytree(written, directory, dirs_exist_ok=True)
        if source.random_weights:  # a short training leaves them meaningless
            written_config = (directory / "config.json").read_text(encoding="utf-8")
            config = json.loads(written_config) | {"random_weights": True}
            write_files(directory, {"config.json": config})
        for file_name, content in (beside or {}).items():
            (directory / file_name).write_bytes(content)
        of_weights = {"config.json", "generation_config.json", ORIGIN}
        for other in side_files(Path(source.tokenizer_path)):
            if other.name not in of_weights:
                shutil.copyfile(other, directory / other.name)

    return save_product("model", name, origin, fill)


def write_origin(directory: Path, origin: Mapping[str, Any]) -> None:
    """Write a product's note of origin."""
    write_files(directory, {ORIGIN: origin})


def origin_of(directory: Path) -> dict[str, Any]:
    """Read a product's note of origin; empty for other directories."""
    try:
        note = json.loads(files.read_text(directory / ORIGIN))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def origin_by(request: Request) -> dict[str, Any]:
    """Start a product's note: its model, and the run, job and attempt, if known."""
    saver = {SAVED_BY: request.saved_by, ATTEMPT: request.attempt} if request.saved_by else {}
    return {"model": request.model, **saver}


class Saving(NamedTuple):
    """The attempt that saved a product, or the content of local files; empty if unknown."""

    saved_by: str = ""  # ids of the run and the job (``Request.saved_by``)
    attempt: int = 0  # 0: unknown
    content: str = ""  # of files that no job saved (``contents.identity_of``)

    @property
    def identity(self) -> str:
        """Unique id of the saving; "" if unknown."""
        saved = f"{self.saved_by}-{self.attempt}" if self.saved_by and self.attempt else ""
        return saved or self.content


def saving_of(kind: str, name: object) -> Saving:
    """Return what this name stands for, as far as known on this machine."""
    if not isinstance(name, str):
        return Saving()
    if kind in PRODUCT_ROOTS:
        note = origin_of(product_root(kind) / Path(name).expanduser())
        attempt = note.get(ATTEMPT)
        if saved_by := str(note.get(SAVED_BY, "")):
            return Saving(saved_by, attempt if isinstance(attempt, int) else 0)
    return Saving(content=identity_of(name))


def find_calibration(name: str) -> tuple[Path, Mapping[str, Any]]:
    """Return a calibration's file of ranges and its note, in which ``measured`` is the identity of
    the graph; raises DataMissing, which names the directory searched."""
    directory = product_root("calibration") / name
    origin = origin_of(directory)
    if "measured" in origin:
        return directory / RANGES, origin
    raise no_product("calibration", name, ORIGIN)


def no_product(kind: str, name: str, file: str) -> DataMissing:
    """Return the error for a product that is not here; those that are here have a ``file``."""
    root, (variable, _) = product_root(kind), PRODUCT_ROOTS[kind]
    there = sorted(one.parent.name for one in root.glob(f"*/{file}"))
    close = difflib.get_close_matches(name, there, n=2, cutoff=0.5)
    known = f"did you mean {' or '.join(close)}?" if close else f"there is: {', '.join(there)}"
    return DataMissing(
        f"no {kind} {name!r} in {root} on this machine{'; ' + known if there else ''}. A job keeps "
        f"one with save_{kind}: {name}; nodes without shared storage need {variable} on storage "
        "that all of them see"
    )
