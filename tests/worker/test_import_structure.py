"""The facts that transformers reads out of its own files at every import, kept on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.worker.import_structure import as_json, of_json, structure_of

STRUCTURE = {"glm": {frozenset({"torch"}): {"modeling_glm": {"GlmModel"}}}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("NIGHTGRID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory with the files of a model."""
    models = tmp_path / "transformers" / "models"
    (models / "glm").mkdir(parents=True)
    (models / "glm" / "modeling_glm.py").write_text('__all__ = ["GlmModel"]\n')
    (models / "reader.py").touch()
    return models


class Reader:
    """Counts how often files are read."""

    def __init__(self, found: object = STRUCTURE) -> None:
        self.found = found
        self.times = 0

    def __call__(self, models: object) -> object:
        self.times += 1
        return self.found


def test_files_that_are_the_same_are_read_once(models: Path) -> None:
    """Another process finds what this one has kept."""
    reads = Reader()
    found = [structure_of(models, models / "reader.py", reads) for _ in range(3)]
    assert found == [STRUCTURE] * 3 and reads.times == 1


@pytest.mark.parametrize("change", ["text", "time", "file", "directory", "gone", "reader"])
def test_a_file_that_has_changed_has_them_read_anew(models: Path, change: str) -> None:
    """Whatever has changed, and however little."""
    reader, file = models / "reader.py", models / "glm" / "modeling_glm.py"
    structure_of(models, reader, Reader())
    if change == "text":
        kept = file.stat()
        file.write_text(file.read_text() + "\n")
        os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    elif change == "time":
        os.utime(file, ns=(1, 1))
    elif change == "file":
        (models / "glm" / "configuration_glm.py").touch()
    elif change == "directory":
        (models / "llama").mkdir()
    elif change == "gone":
        file.unlink()
    else:
        os.utime(reader, ns=(1, 1))
    reads = Reader({"other": {}})
    assert structure_of(models, reader, reads) == {"other": {}} and reads.times == 1


def test_compiled_files_beside_them_do_not_count(models: Path) -> None:
    """Python writes those when it imports."""
    structure_of(models, models / "reader.py", Reader())
    (models / "glm" / "__pycache__").mkdir()
    (models / "glm" / "__pycache__" / "modeling_glm.py").touch()
    reads = Reader()
    assert structure_of(models, models / "reader.py", reads) == STRUCTURE and not reads.times


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[1]", b"{}", b'{"list": []}', b'{"set": [{"dict": []}]}', b"[" * 10**5],
)
def test_a_broken_cache_costs_only_the_reading(models: Path, cache: Path, content: bytes) -> None:
    """As does one that cannot be written."""
    structure_of(models, models / "reader.py", Reader())
    (kept,) = cache.glob("import-structure-*/structure")
    kept.chmod(0o600)
    kept.write_bytes(content)
    assert structure_of(models, models / "reader.py", Reader()) == STRUCTURE
    os.environ["NIGHTGRID_CACHE"] = str(kept / "nowhere")
    assert structure_of(models, models / "reader.py", Reader()) == STRUCTURE


def test_what_cannot_be_kept_is_read(models: Path) -> None:
    """A later version of transformers may find objects of its own."""
    found = {"glm": object()}
    assert structure_of(models, models / "reader.py", Reader(found)) == found


@given(
    st.recursive(
        st.text() | st.sets(st.text()),
        lambda inner: st.dictionaries(st.text() | st.frozensets(st.text()), inner),
    )
)
def test_a_structure_comes_back_as_it_was(structure: object) -> None:
    """With sets and frozen sets told apart, which JSON has not."""
    back = of_json(json.loads(json.dumps(as_json(structure))))
    assert back == structure and type(back) is type(structure)


@pytest.mark.slow
def test_transformers_offers_the_same_as_without_it() -> None:
    """By way of what is kept, and as it is."""
    command = [sys.executable, "-c", _OFFERS]
    told = [
        subprocess.run([*command, how], capture_output=True, text=True, check=True).stdout
        for how in ("plain", "kept")
    ]
    assert told[0] and told[0] == told[1]


_OFFERS = """
import contextlib, hashlib, sys, types
from orchestrator.worker.import_structure import kept_import_structure
kept = sys.argv[1] == "kept"
with kept_import_structure() if kept else contextlib.nullcontext():
    import transformers
    import transformers.models
    import transformers.models.glm
from transformers.models.glm import GlmConfig
offered = [
    {name: sorted(module._class_to_module.items()), "names": sorted(dir(module))}
    for name, module in (("transformers", transformers), ("models", transformers.models))
]
reads = transformers.utils.import_utils.create_import_structure_from_path
assert (type(reads) is types.FunctionType) == kept  # transformers' own is a cache
text = repr((offered, GlmConfig().to_dict()))
print(len(text), hashlib.sha256(text.encode()).hexdigest())
"""
