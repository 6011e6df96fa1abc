"""The id of a run, bound to its directory's path, so that a copy is another run.

The next driver finds a dead driver's processes by it. ``run.id`` has the id on line 1, and JSON on
line 2: path, host and former ids. A directory renamed on its host keeps its id.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import StoreError
from orchestrator.store import disk
from orchestrator.store.files import RUN_ID

_ID = re.compile(r"[0-9a-f]{12}")
_MOST_BYTES = 64 * 2**10
_MOST_FORMER = 32  # ids that a directory had before; the latest are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The content of ``run.id``."""

    run_id: str  # 12 hexadecimal digits
    path: str  # for which it was written
    host: str
    former: tuple[str, ...] = ()  # earlier ids of this directory or of a copy's original
    note: str = ""  # a sentence for the user about a new id


def identify(directory: Path, quarantine: Path) -> Identity:
    """Read or renew this directory's id, under the run's lock; StoreError on I/O errors."""
    file = directory / RUN_ID
    try:
        known = _parse(disk.read(file, _MOST_BYTES, follow=False))
    except FileNotFoundError:
        return _write(directory, secrets.token_hex(6))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and disk.may_pass(error):  # a new id would lose the old
            raise StoreError(f"{file} cannot be read now: {reason}. Try again") from error
        try:
            aside = disk.set_aside(file, quarantine)
        except OSError as problem:
            where = f"{file} holds no run id ({reason})"
            raise StoreError(f"{where} and cannot be set aside: {problem.strerror}") from problem
        note = f"{file} held no run id ({reason}); set aside as {aside}"
        return _write(directory, secrets.token_hex(6), note=note)
    here = os.path.realpath(directory)
    if known.path == here:
        return known
    there = ids_at(Path(known.path))[:1] == (known.run_id,)
    if there or known.host != socket.gethostname():
        note = (
            f"{here} was copied from {known.path}: it goes on as a run of its own, "
            f"and nothing that belongs to run id {known.run_id} is touched"
        )
        return _write(directory, secrets.token_hex(6), (*known.former, known.run_id), note)
    return _write(directory, known.run_id, known.former)


def ids_at(directory: Path) -> tuple[str, ...]:
    """The id in a directory and its former ids; empty where there is none."""
    try:
        known = _parse(disk.read(directory / RUN_ID, _MOST_BYTES, follow=False))
    except (OSError, ValueError):
        return ()
    return known.run_id, *known.former


def _write(directory: Path, run_id: str, former: tuple[str, ...] = (), note: str = "") -> Identity:
    path, host = os.path.realpath(directory), socket.gethostname()
    former = former[-_MOST_FORMER:]
    detail = json.dumps({"path": path, "host": host, "former": former})
    # Synced: a new id after a power failure would hide the processes of the old one.
    disk.write_durably(directory, RUN_ID, f"{run_id}\n{detail}\n".encode())
    return Identity(run_id=run_id, path=path, host=host, former=former, note=note)


def _parse(data: bytes) -> Identity:
    """Parse a file; ValueError with the reason if invalid."""
    head, _, rest = data.strip().partition(b"\n")
    run_id = head.decode("ascii", "replace").strip()
    if not _ID.fullmatch(run_id):
        raise ValueError(f"it begins with {run_id[:40]!a}, and an id is 12 hexadecimal digits")
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        detail = json.loads(rest)
        path, host, former = detail["path"], detail["host"], detail["former"]
        texts = all(isinstance(text, str) and len(text) <= 4096 for text in (path, host, *former))
        if texts and "\0" not in path and all(map(_ID.fullmatch, former)):
            return Identity(run_id=run_id, path=path, host=host, former=tuple(former))
    raise ValueError("its second line does not name a directory")
