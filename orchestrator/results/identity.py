"""The id of a run, bound to the run's directory, so that a copy of the directory is another run.

Two things are found by the id of a run: the processes that a dead driver has left, which the next
driver ends (``worker/orphans.py``), and the rows that found no room in the directory
(``Store.spill``). Both belong to one directory. A copy carries the file ``run.id`` along, so the
file also records which directory it was written for: line 1 is the id, line 2 is JSON with the
``Place`` of the directory and the ids that it had before.

A directory keeps its id where the record shows that it is the one: the same inode of the same file
system, under any path and seen from any host. A device number may change with a reboot; then the
same inode at the same path will do. Any other directory is taken for a copy, also one that was
moved to another file system, since it cannot be told from a copy whose original was renamed: a new
id costs one command (``nightgrid run --adopt``), a shared one costs the other run its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, fragments, paths
from orchestrator.results.lock import Holder

_ID = re.compile(r"[0-9a-f]{12}")
_MOST_BYTES = 64 * 2**10
_MOST_FORMER = 32  # ids that a directory had before; the latest are kept
_MOST_SHOWN = 200  # characters of a path in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory as the system calls show it. ``device`` means something until the next boot."""

    path: str
    device: int
    inode: int
    filesystem: int  # from its UUID or device number; 0 on file systems that give none (NFS)
    host: str
    boot_id: str


class Relation(Enum):
    """Relation of a directory to the one for which its ``run.id`` was written."""

    SAME = "same"
    MOVED = "moved"  # renamed, or its file system is mounted elsewhere
    REMOUNTED = "remounted"  # the device number has changed
    OTHER_HOST = "seen from another host"
    COPIED = "copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """An id that this directory had before, or that the directory had which it was copied from."""

    run_id: str
    path: str  # of the directory whose id it was; "" where that is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The id of an open run. ``notes`` tell the user what was found, in sentences."""

    run_id: str
    former: tuple[Former, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The content of ``run.id``; a version before 0.2 wrote no place."""

    run_id: str
    place: Place | None = None
    former: tuple[Former, ...] = ()


def is_run_id(text: str) -> bool:
    """Return whether the text may be part of a path and of a pattern for processes."""
    return _ID.fullmatch(text) is not None


def relation(recorded: Place, here: Place, *, original_is_there: bool) -> Relation:
    """Relation of the directory ``here`` to the recorded one.

    Args:
        recorded: the directory for which the id was written.
        here: the directory in which the id was found.
        original_is_there: another directory than ``here`` lies at the recorded path and has the id.
    """
    if recorded.inode != here.inode:
        return Relation.COPIED
    same_host = recorded.host == here.host
    same_path = recorded.path == here.path
    same_boot = same_host and recorded.boot_id == here.boot_id
    if same_boot and recorded.device == here.device:  # nothing else has these two numbers now
        return Relation.SAME if same_path else Relation.MOVED
    if original_is_there:  # the file system was cloned or snapshotted, inodes and all
        return Relation.COPIED
    if recorded.filesystem == here.filesystem:
        if not same_host:
            return Relation.OTHER_HOST
        return Relation.SAME if same_path else Relation.MOVED
    return Relation.REMOUNTED if same_host and same_path else Relation.COPIED


def identify(directory: Path, quarantine: Path) -> Identity:
    """Read the id of a run and check that it is this directory's; make one where it is not. Only
    the holder of the run's lock may.

    Raises:
        StoreError: the id cannot be written or, for the moment, read; or what lies in its place
            cannot be set aside.
    """
    here = place_of(directory)
    try:
        record = _parse(disk.read(directory / paths.RUN_ID, _MOST_BYTES, follow=False))
    except FileNotFoundError:
        return _new(directory, here)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and fragments.may_pass(error):  # a new id would lose the old
            raise StoreError(
                f"{directory / paths.RUN_ID} cannot be read now: {reason}. Try again"
            ) from error
        try:
            aside = fragments.set_aside(directory / paths.RUN_ID, quarantine)
        except OSError as problem:
            where = f"{directory / paths.RUN_ID} holds no run id ({reason})"
            raise StoreError(f"{where} and cannot be set aside: {problem.strerror}") from problem
        note = f"{directory / paths.RUN_ID} held no run id ({reason}); set aside as {aside}"
        return _new(directory, here, notes=(note,))
    if record.place is None:
        return _bind_plain(directory, here, record)
    there = _original_is_there(record, here)
    found = relation(record.place, here, original_is_there=there)
    if found is Relation.COPIED:
        origin = record.place.path
        note = (
            f"{_shown(here.path)} was copied from {_shown(origin)}: it goes on as a run of its "
            f"own, and nothing that belongs to run id {record.run_id} is touched"
        )
        former = (*record.former, Former(run_id=record.run_id, path=origin))
        return _new(directory, here, former=former, notes=(note,))
    if record.place != here:
        with contextlib.suppress(StoreError):  # on a full disk; the next driver will
            _write(directory, _Record(run_id=record.run_id, place=here, former=record.former))
    return Identity(run_id=record.run_id, former=record.former)


def has_id(directory: str, run_id: str) -> bool:
    """Return whether a directory that can be seen from here is the run of this id."""
    return bool(directory) and id_at(Path(directory)) == run_id


def place_of(directory: Path) -> Place:
    """The directory as it is now.

    Raises:
        StoreError: it cannot be looked at.
    """
    try:
        device, inode, filesystem = disk.numbers(directory)
    except OSError as error:
        raise StoreError(f"cannot look at {directory}: {error.strerror or error}") from error
    me = Holder.this_process()
    return Place(
        path=os.path.realpath(directory),
        device=device,
        inode=inode,
        filesystem=filesystem,
        host=me.host,
        boot_id=me.boot_id,
    )


def _bind_plain(directory: Path, here: Place, record: _Record) -> Identity:
    """Bind an id without a record of its directory, of version 0.1.0. Where another run of the same
    results has the id too, one of them is a copy, and which cannot be told."""
    others = [
        name
        for name in _names(directory.parent)
        if name != directory.name and id_at(directory.parent / name) == record.run_id
    ]
    if others:
        note = (
            f"runs {directory.name} and {others[0]} have the same run id: one is a copy. "
            f"{directory.name} goes on as a run of its own, and nothing that belongs to run id "
            f"{record.run_id} is touched"
        )
        former = (Former(run_id=record.run_id, path=""),)
        return _new(directory, here, former=former, notes=(note,))
    _write(directory, _Record(run_id=record.run_id, place=here))
    return Identity(run_id=record.run_id)


def _new(
    directory: Path, here: Place, former: tuple[Former, ...] = (), notes: tuple[str, ...] = ()
) -> Identity:
    """Give the directory an id that no other has."""
    made = secrets.token_hex(6)
    former = former[-_MOST_FORMER:]
    _write(directory, _Record(run_id=made, place=here, former=former))
    return Identity(run_id=made, former=former, notes=notes)


def _original_is_there(record: _Record, here: Place) -> bool:
    """Return whether another directory with the id lies where the id was written, seen from this
    host."""
    place = record.place
    if place is None or place.host != here.host or place.path == here.path:
        return False
    with contextlib.suppress(OSError, ValueError):
        device, inode, _ = disk.numbers(Path(place.path))
        return (device, inode) != (here.device, here.inode) and (
            id_at(Path(place.path)) == record.run_id
        )
    return False


def id_at(directory: Path) -> str | None:
    """The id in a directory; None where there is none."""
    return next(iter(ids_at(directory)), None)


def ids_at(directory: Path) -> tuple[str, ...]:
    """The id in a directory, then those that it had before; empty where there is none."""
    try:
        record = _parse(disk.read(directory / paths.RUN_ID, _MOST_BYTES, follow=False))
    except (OSError, ValueError):
        return ()
    return record.run_id, *(each.run_id for each in record.former)


def _names(directory: Path) -> list[str]:
    try:
        return sorted(disk.names(directory))
    except OSError:
        return []


# ---------------------------------------------------------------- the file


def _write(directory: Path, record: _Record) -> None:
    former = [asdict(each) for each in record.former]
    detail = {"place": asdict(record.place) if record.place else None, "former": former}
    text = f"{record.run_id}\n{json.dumps(detail)}\n"
    # Synced: an id that a power failure takes away takes the way to the spilled rows with it.
    fragments.write_durably(directory, paths.RUN_ID, text.encode())


def _parse(data: bytes) -> _Record:
    """The record in the bytes of a file.

    Raises:
        ValueError: they are none; says why.
    """
    head, _, rest = data.strip().partition(b"\n")
    run_id = head.decode("ascii", "replace").strip()
    if not is_run_id(run_id):
        raise ValueError(f"it begins with {run_id[:40]!a}, and an id is 12 hexadecimal digits")
    if not rest:
        return _Record(run_id=run_id)
    try:
        detail = json.loads(rest)
        place = Place(**_checked(detail["place"], Place))
        former = tuple(Former(**_checked(each, Former)) for each in detail["former"])
        if len(former) > _MOST_FORMER or not all(is_run_id(each.run_id) for each in former):
            raise ValueError("former ids")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its second line does not record a directory: {error!r:.80}") from error
    return _Record(run_id=run_id, place=place, former=former)


def _checked(values: Mapping[str, object], kind: type[Place] | type[Former]) -> dict[str, Any]:
    """The values of a record's fields.

    Raises:
        ValueError, KeyError, TypeError: one is absent, of another type, or not in its range.
    """
    checked = {}
    for field in fields(kind):
        value = values[field.name]
        if field.type == "int":
            sound = type(value) is int and 0 <= value < 2**64
        else:
            sound = isinstance(value, str) and len(value) <= 4096 and "\0" not in value
        if not sound:
            raise ValueError(f"{field.name} is {value!r:.40}")
        checked[field.name] = value
    return checked


def _shown(path: str) -> str:
    """A path for a message: one that comes from a file may hold anything."""
    text = path if path.isprintable() else ascii(path)
    return text if len(text) <= _MOST_SHOWN else f"…{text[-_MOST_SHOWN:]}"
