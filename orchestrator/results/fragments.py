"""Files that are whole or absent, the names of files of rows, and how damage is noticed.

A file is written under a name that readers ignore, synced, and renamed; then its directory
is synced. A crash at any instant leaves the old state or the new. The name ends in the SHA-256 of
the bytes, because Parquet alone does not notice all damage: of 1,426 one-byte flips in a
file, 52 read back as wrong values without an error. The same bytes have the same name, so
writing a row again after a failure cannot make it two.

    rows-<rows>-<attempt>-<sha256[:16]>.parquet    rows of a few seconds; their highest attempt
    compacted-<rows>-<sha256[:16]>.parquet         many rows, instead of files it lists
    .<name>.partial                                not written yet; left behind by a crash
    <job>-<attempt>-<sha256[:16]>.parquet          one row, as earlier versions wrote it
    rows-<attempt>-<sha256[:16]>.parquet           rows written together by earlier versions

A *record* is what one append writes, one row or several (``record.py``). It is named like a file
that ends in ``.json``, or in ``.arrow`` if it is an Arrow IPC stream, and lies in a log of rows
(``append_log.py``), or in a file of its own where a row found no room at home (``spilled.py``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import StoreError, StoreFull
from orchestrator.results import disk

_LOG = logging.getLogger("nightgrid.store")

_DIGEST_LENGTH = 16
_ATTEMPT = r"(?P<job>[A-Za-z0-9_][A-Za-z0-9_-]{0,79})-(?P<attempt>\d{1,9})"
_FRAGMENT = re.compile(_ATTEMPT + r"-(?P<digest>[0-9a-f]{16})\.(?P<kind>parquet|json|arrow)")
_COMPACTED = re.compile(r"compacted-(?P<rows>\d+)-(?P<digest>[0-9a-f]{16})\.parquet")
_PARTIAL = re.compile(r"\.(?P<name>.+\.(parquet|json|arrows?))\.partial")
#: Stands in a name for the jobs of rows that were written together.
TOGETHER = "rows"
_TOGETHER = re.compile(rf"{TOGETHER}(-(?P<rows>\d+))?")
RECORD, ARROW_RECORD = ".json", ".arrow"
#: So many of them at most.
MOST_TOGETHER = 1000
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
#: Codes of failures that are none of the file: see ``may_pass``.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A file of results that cannot be trusted, and why. ``path`` is where it lies now.

    Attributes:
        passing: another look may find it sound: nothing is known of its bytes.
    """

    path: Path
    reason: str
    passing: bool = False


def may_pass(error: OSError) -> bool:
    """Return whether a failure to read says nothing of the file: another look may find it sound."""
    return error.errno in _PASSING


def digest(data: bytes) -> str:
    """The part of the SHA-256 that a file name holds."""
    return hashlib.sha256(data).hexdigest()[:_DIGEST_LENGTH]


def fragment_name(job_id: str, attempt_number: int, data: bytes) -> str:
    """The name of a Parquet file with this content: one row, or, as of job ``TOGETHER``, several.

    Raises:
        StoreError: the job id cannot be part of a file name.
    """
    refuse_unnameable(job_id, attempt_number)
    return f"{job_id}-{attempt_number}-{digest(data)}.parquet"


def together_name(rows: int, attempt_number: int, data: bytes) -> str:
    """The name of a Parquet file with so many rows, the highest attempt being this."""
    return fragment_name(f"{TOGETHER}-{rows}", attempt_number, data)


def record_name(job_id: str, attempt_number: int, data: bytes, kind: str = RECORD) -> str:
    """The name of a record. Its checksum is of all that stands before it, too: in a log, names rot
    as contents do.

    Raises:
        StoreError: the job id cannot be part of a name.
    """
    refuse_unnameable(job_id, attempt_number)
    whose = f"{job_id}-{attempt_number}-"
    return f"{whose}{digest(whose.encode() + data)}{kind}"


def is_record(name: str) -> bool:
    """Return whether this is the name of a record."""
    return name.endswith((RECORD, ARROW_RECORD)) and _FRAGMENT.fullmatch(name) is not None


def is_arrow_record(name: str) -> bool:
    """Return whether a record of this name is an Arrow IPC stream."""
    return name.endswith(ARROW_RECORD)


def replaces_others(name: str) -> bool:
    """Return whether a file of this name holds rows that were safe elsewhere when it was made."""
    match = _FRAGMENT.fullmatch(name)
    together = _TOGETHER.fullmatch(match["job"]) if match else None
    return is_compacted(name) or (together is not None and together["rows"] is not None)


def most_rows(name: str) -> int:
    """The number of rows in the file of this name, as far as the name tells; never too low."""
    if match := _COMPACTED.fullmatch(name):
        return int(match["rows"])
    match = _FRAGMENT.fullmatch(name)
    together = _TOGETHER.fullmatch(match["job"]) if match else None
    if together is not None:
        return int(together["rows"] or MOST_TOGETHER)
    return int(match is not None)


def refuse_unnameable(job_id: str, attempt_number: int) -> None:
    """Check that a job and an attempt may have a row in a file of its own.

    Raises:
        StoreError: the job id cannot be part of a file name, or the number is none.
    """
    if not re.fullmatch(_ATTEMPT, f"{job_id}-{attempt_number}") or job_id == "compacted":
        raise StoreError(f"job id {job_id!r}, attempt {attempt_number}: no file can be named so")


def compacted_name(rows: int, data: bytes) -> str:
    """The name of a compacted file with this content."""
    return f"compacted-{rows}-{digest(data)}.parquet"


def is_compacted(name: str) -> bool:
    """Return whether the file holds many rows in the place of fragments."""
    return _COMPACTED.fullmatch(name) is not None


def partial_target(name: str) -> str | None:
    """The name that a file left behind by a crash was to have; None if it is no such file."""
    match = _PARTIAL.fullmatch(name)
    return match["name"] if match else None


def attempt_of(name: str) -> tuple[str, int] | None:
    """The job id and the number of the attempt whose row the file holds (``TOGETHER`` and the
    highest number where it holds several); None for other files."""
    match = _FRAGMENT.match(name)
    if match is None or is_compacted(name):
        return None
    together = _TOGETHER.fullmatch(match["job"])
    return TOGETHER if together else match["job"], int(match["attempt"])


def damage_of(name: str, data: bytes) -> str | None:
    """Reason why the bytes cannot be what was written under this name; None if they are."""
    match = _COMPACTED.fullmatch(name) or _FRAGMENT.fullmatch(name)
    if match is None:
        return "the name is not one that Nightgrid gives, so its content cannot be verified"
    whose = name[: match.start("digest")] if is_record(name) else ""
    found = digest(whose.encode() + data)
    if found != match["digest"]:
        return f"its {len(data):,} bytes have SHA-256 {found}…, its name says otherwise"
    return None


def write_durably(
    directory: Path, name: str, data: bytes, allowed: Callable[[], object] = lambda: None
) -> Path:
    """Create or replace ``directory/name``; on return it survives a power failure.

    Args:
        allowed: asked when the data is safe, before it has its name; it raises a StoreError if the
            file must not appear.

    Raises:
        StoreFull: no space is left; the directory is as it was.
        StoreError: anything else the file system says.
    """
    aside, target = directory / f".{name}.partial", directory / name
    try:
        try:
            _write(aside, data, synced=True)
            allowed()
            disk.rename(aside, target)
        except (OSError, StoreError):
            with contextlib.suppress(OSError):
                disk.remove(aside)
            raise
        disk.sync_directory(directory)
    except OSError as error:
        raise write_error(target, error) from error
    return target


def replace_file(directory: Path, name: str, data: bytes) -> Path:
    """Replace a file that is only looked at (a page, a status): whole, but not synced."""
    aside = directory / f".{name}.{os.getpid()}.aside"
    try:
        _write(aside, data, synced=False)
        disk.rename(aside, directory / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            disk.remove(aside)
        raise write_error(directory / name, error) from error
    return directory / name


def write_error(path: Path, error: OSError) -> StoreError:
    """Convert an error of the file system to the store's: ``StoreFull`` where no space is left."""
    kind = StoreFull if error.errno in _NO_SPACE else StoreError
    return kind(f"cannot write {path}: {error.strerror or error}")


def _write(path: Path, data: bytes, *, synced: bool) -> None:
    handle = disk.create(path)
    try:
        write_all(handle, data)
        if synced:
            disk.sync(handle)
    finally:
        disk.close(handle)


def write_all(handle: int, data: bytes) -> None:
    """Write data to an open file: a disk that fills up makes a write short before it fails."""
    view = memoryview(data)
    while view:
        view = view[disk.write(handle, view) :]


def recover(directory: Path, quarantine: Path) -> list[Damage]:
    """Clear up after a crash; only the holder of the lock may. No row is deleted.

    What was written whole but not yet renamed becomes a row: its measurement did end so. What is
    torn or corrupt moves to ``quarantine``; what cannot be read for now stays.
    """
    found: list[Damage] = []
    for name in sorted(disk.names(directory)):
        path = directory / name
        target = partial_target(name)
        if target is None and not name.endswith(".parquet"):
            continue
        try:
            data = disk.read(path)
        except OSError as error:  # a directory or a dangling link of this name, or a bad sector
            if may_pass(error):
                _LOG.warning("%s cannot be read now, and stays: %s", path, error.strerror)
                continue
            found.append(_aside_or_left(path, quarantine, str(error)))
            continue
        reason = damage_of(target or name, data)
        if reason is not None and target is not None and replaces_others(target):
            disk.remove(path)  # all that it was to hold is there
        elif reason is not None:
            found.append(_aside_or_left(path, quarantine, reason))
        elif target is not None:
            write_durably(directory, target, data)
    return found


def remove_given_up(directory: Path) -> None:
    """Remove files that stand for others and never got their names: what they were to hold is where
    it was, and may be in another file soon. Only the holder of the lock may.

    Raises:
        StoreError: one cannot be removed now, and may appear later.
    """
    for name in disk.names(directory):
        target = partial_target(name)
        if target is None or not replaces_others(target):
            continue
        try:
            disk.remove(directory / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            why = error.strerror or error
            raise StoreError(f"{directory / name} cannot be removed: {why}") from error


def _aside_or_left(path: Path, quarantine: Path, reason: str) -> Damage:
    """Set a file aside; what we may not move, another user's directory for one, stays there."""
    try:
        return Damage(path=set_aside(path, quarantine), reason=reason)
    except OSError as error:
        left = f"{reason}; it cannot be set aside: {error.strerror or error}"
        return Damage(path=path, reason=left)


def set_aside_earlier(quarantine: Path) -> list[Damage]:
    """The files set aside so far: damaged ones (``recover``), and the final rows of attempts that
    another driver had taken for lost."""
    try:
        names = disk.names(quarantine)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [Damage(path=quarantine, reason=f"cannot be read: {error.strerror or error}")]
    return [
        Damage(path=quarantine / name, reason="set aside: torn, corrupt or too late")
        for name in sorted(names)
    ]


def set_aside(path: Path, quarantine: Path) -> Path:
    disk.make_directory(quarantine)
    target, number = quarantine / path.name.lstrip("."), 1
    while disk.is_there(target):
        target = quarantine / f"{path.name.lstrip('.')}.{number}"
        number += 1
    disk.rename(path, target)
    disk.sync_directory(quarantine)
    disk.sync_directory(path.parent)
    return target


def valid_name(name: str, what: str) -> str:
    """``name`` if it can safely name a file or directory of results, else an error.

    Raises:
        StoreError: it is empty, too long, hidden, or could lead out of its directory.
    """
    if re.fullmatch(r"[\w][\w.+-]*", name) and len(name.encode()) <= 120:
        return name
    raise StoreError(
        f"{what} {name!r} cannot name a directory or file: use letters, digits, '_', '-', '+' and "
        "'.', beginning with a letter or digit, 120 bytes at most"
    )
