"""Identity of local files: what a path stood for when a job read it.

A row keeps it, so that new weights under an old path are not taken for what was measured. It is
made of names, sizes and samples of the content, not of times: a copy on another node is the same.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

#: Beginning of an identity, which tells it from that of a saved product.
FILES = "files-"
_ENDS_BYTES, _SAMPLE_BYTES, _SAMPLES = 2**20, 2**16, 16
#: Directories of more files have no identity.
MOST_FILES = 10_000
_NO_CONTENT = (".md", ".png", ".jpg", ".pdf")


def canonical(name: str) -> str:
    """Return the one spelling of a path: no trailing or doubled slashes, no ``./`` before another
    directory. Names that are no paths, and addresses, stay as they are."""
    if "/" not in name or ":" in name:
        return name
    path = os.path.normpath(name)
    return path if "/" in path else f"./{path}"  # which may be the name of something else


def place_of(name: str) -> str:
    """Return the absolute path of a name that may be one, the same for all spellings of a path."""
    return os.path.abspath(os.path.expanduser(name)) if ":" not in name else name


def identity_of(path: str) -> str:
    """Return the identity of a file, or of a directory's files; "" if there is none or too many.

    Of each file its first and last MiB count, and 16 samples of 64 KiB between them.
    """
    try:
        root = Path(path).expanduser()
        # Links to directories are read, too; one may lead to a tree without end.
        found = [root] if root.is_file() else _files(root) or _files(root, links=False)
        stamps = tuple(
            (file.relative_to(root).as_posix(), (status := file.stat()).st_size, status.st_mtime_ns)
            for file in found
        )
        return _identity(root, stamps) if stamps else ""
    except (OSError, ValueError, RuntimeError):
        return ""


def fingerprint(directory: Path) -> str:
    """Return the identity of a directory's files for keys of caches; the path's if it has none."""
    path = str(directory.resolve())
    return identity_of(path) or hashlib.sha256(path.encode()).hexdigest()[:16]


def _files(root: Path, *, links: bool = True) -> list[Path]:
    """The files of a directory that are not hidden and hold no documentation, each directory's
    once: links may go in circles, or nowhere."""
    found: list[Path] = []
    seen: set[str] = set()
    for directory, below, names in os.walk(root, followlinks=links):
        real = os.path.realpath(directory)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith("."))
        shown = (name for name in sorted(names) if not name.startswith("."))
        content = [name for name in shown if not name.lower().endswith(_NO_CONTENT)]
        if len(found) + len(below) + len(content) > MOST_FILES:
            return []
        found += [file for name in content if (file := Path(directory) / name).is_file()]
    return found


@lru_cache(maxsize=64)
def _identity(root: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, size, _ in stamps:
        digest.update(f"{name if name != '.' else ''} {size}\n".encode())
        with open(root / name, "rb") as content:
            digest.update(content.read(_ENDS_BYTES))
            if size <= 2 * _ENDS_BYTES:
                digest.update(content.read(_ENDS_BYTES))
                continue
            between = size - 2 * _ENDS_BYTES
            for number in range(_SAMPLES):
                content.seek(_ENDS_BYTES + between * number // _SAMPLES)
                digest.update(content.read(_SAMPLE_BYTES))
            content.seek(size - _ENDS_BYTES)
            digest.update(content.read(_ENDS_BYTES))
    return FILES + digest.hexdigest()[:16]
