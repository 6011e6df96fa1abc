"""Files that git keeps are meant to be there."""

from __future__ import annotations

import subprocess

import pytest
from source_tree import ROOT


def test_nothing_is_kept_that_a_merge_or_patch_left() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    kept = subprocess.run(
        ["git", "ls-files", "*.orig", "*.rej"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert kept.stdout.splitlines() == []
