"""The spawner of emulated cards, with the libraries of a Gaudi host."""

from __future__ import annotations

from pathlib import Path

import pytest
from patience import until

from orchestrator.worker.spawn import PRELOAD, OwnSpawner


@pytest.mark.timeout(300)
def test_emulated_workers_are_forked(tmp_path: Path) -> None:
    """All that they need is there in this version of transformers, and leaves one thread, although
    scikit-learn imports pandas, and that Arrow."""
    log = tmp_path / "log"
    spawner = OwnSpawner(PRELOAD, threads=1, log=log)
    try:
        assert until(lambda: "serving" in log.read_text(), 60)
    finally:
        spawner.close()
    text = log.read_text()
    assert "serving, forked workers" in text and "cannot preload" not in text, text
