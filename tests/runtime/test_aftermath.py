"""The aftermath of a driver that died without a word: its page, and telling who asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from measurements import row

from orchestrator.results.store import Store

ROOT = Path(__file__).resolve().parents[2]


def settle(place: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run it as the supervisor does."""
    told = {
        "run": "night",
        "results": str(place / "results"),
        "notify": [f"tee {place / 'notice.json'}"],
        "ending": "interrupted",
        "reason": "the driver was killed by SIGKILL; it is started again",
        "exit_code": 137,
    }
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.driver.supervisor"],
        input=json.dumps(told | changes),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )


@pytest.mark.slow
def test_what_was_measured_is_reported_and_told(tmp_path: Path) -> None:
    """The page has the rows that the dead driver wrote, the notice says that it goes on."""
    with Store.open(tmp_path / "results", "night") as store:
        store.append(row(0), row(1))
    done = settle(tmp_path)
    assert done.returncode == 0 and "notified the command tee" in done.stderr
    assert "night" in (store.path / "report.html").read_text()
    notice = json.loads((tmp_path / "notice.json").read_text())
    assert (notice["state"], notice["exit_code"], notice["jobs"]) == ("interrupted", 137, 2)
    assert notice["report"] == str(store.path / "report.html")
    assert "was interrupted" in notice["text"] and "killed by SIGKILL" in notice["text"]


def test_who_asked_is_told_even_if_nothing_was_measured(tmp_path: Path) -> None:
    """There is no run, no page and no traceback."""
    done = settle(tmp_path, ending="failed")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    notice = json.loads((tmp_path / "notice.json").read_text())
    assert (notice["state"], notice["jobs"], notice["report"]) == ("failed", 0, "")
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_hook_that_cannot_be_told_does_not_matter(tmp_path: Path) -> None:
    """It is said, and the page is there."""
    with Store.open(tmp_path / "results", "night") as store:
        store.append(row(0))
    done = settle(tmp_path, notify=["@/nowhere"])
    assert done.returncode == 0 and "cannot notify anyone" in done.stderr
    assert (store.path / "report.html").exists()
