"""Wheels for tests, of one module each, in a directory that takes an index's place."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest


def make_wheel(
    directory: Path, name: str, version: str, source: str, requires: Sequence[str] = ()
) -> None:
    """Write ``NAME-VERSION-py3-none-any.whl`` with the module ``NAME.py``."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    texts = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in texts.items()]
    texts[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in texts.items():
            wheel.writestr(path, text)


def make_source(directory: Path, name: str, version: str, backend: str) -> None:
    """Write ``NAME-VERSION.tar.gz`` whose build backend is this module."""
    texts = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\n"
        "backend-path = ['.']\n",
        "backend.py": backend,
    }
    with tarfile.open(directory / f"{name}-{version}.tar.gz", "w:gz") as archive:
        for path, text in texts.items():
            member = tarfile.TarInfo(f"{name}-{version}/{path}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


def use_only(directory: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see only this directory, and put layers into a new cache."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("NIGHTGRID_CACHE", str(cache))


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
