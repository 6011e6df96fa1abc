"""Identity and spelling of local files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from workloads.util.contents import FILES, canonical, identity_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    (directory / "weights.bin").write_bytes(bytes(range(256)) * 20_000)  # 5 MiB
    (directory / "sub" / "config.json").write_text("{}")
    (directory / "README.md").write_text("about")
    return directory


def test_a_copy_is_the_same_whatever_its_times_and_notes(model: Path, tmp_path: Path) -> None:
    identity = identity_of(str(model))
    assert identity.startswith(FILES)
    copy = shutil.copytree(model, tmp_path / "copy")
    os.utime(copy / "weights.bin", (1, 1))
    (copy / "README.md").write_text("more about")
    (copy / ".git").mkdir()
    (copy / ".git" / "HEAD").write_text("x")
    assert identity_of(str(copy)) == identity


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2**20 + 70_000 * 45, -1])
def test_other_content_is_another_identity(model: Path, place: int) -> None:
    """At the ends, and within 64 KiB of each sixteenth between them; sizes and names, too."""
    before = identity_of(str(model))
    weights = model / "weights.bin"
    data = bytearray(weights.read_bytes())
    part = slice(max(place % len(data) - 300_000, 0), place % len(data) + 1)
    data[part] = bytes(255 - byte for byte in data[part])
    weights.write_bytes(data)
    changed = identity_of(str(model))
    assert changed != before
    weights.write_bytes(data + b"\0")
    assert identity_of(str(model)) not in (before, changed)
    weights.rename(model / "other.bin")
    assert identity_of(str(model)) not in (before, changed)


@pytest.mark.parametrize("beside", ["", "gone", ".", "../model", "../shared", "../endless"])
def test_content_behind_a_link_counts_whatever_other_links_there_are(
    model: Path, beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To nowhere, in a circle, to a directory that is read already, to one of too many files."""
    shared, endless = model.parent / "shared", model.parent / "endless"
    shared.mkdir()
    endless.mkdir()
    (shared / "data.jsonl").write_text("one")
    for number in range(30):
        (endless / f"{number}").touch()
    monkeypatch.setattr("workloads.util.contents.MOST_FILES", 20)
    changing = model / "sub" / "config.json" if "endless" in beside else shared / "data.jsonl"
    (model / "data").symlink_to(shared)
    if beside:
        (model / "also").symlink_to(beside)
    before = identity_of(str(model))
    assert before.startswith(FILES)
    changing.write_text("two")
    assert identity_of(str(model)) not in ("", before)


@pytest.mark.parametrize("name", ["org/name", "tiny-chatglm3", "", "a\0b", "x" * 5000])
def test_what_is_no_local_path_has_none(name: str) -> None:
    assert identity_of(name) == "" or name == ""


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("models/good/", "models/good"),
        ("./models//good", "models/good"),
        ("/srv//m/../good/", "/srv/good"),
        ("./tiny-bert", "./tiny-bert"),  # not the embedded model
        ("good/", "./good"),
        ("tiny-bert", "tiny-bert"),
        ("org/name@main", "org/name@main"),
        ("random:./shape/", "random:./shape/"),
        ("s3://bucket//x", "s3://bucket//x"),
    ],
)
def test_a_path_has_one_spelling(name: str, spelling: str) -> None:
    assert canonical(name) == spelling
    assert canonical(spelling) == spelling
