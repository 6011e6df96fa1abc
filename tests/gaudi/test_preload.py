"""The process server of emulated cards, with the libraries of a Gaudi host."""

from __future__ import annotations

from pathlib import Path

import pytest
from patience import until

from orchestrator.worker.host_server import PRELOAD, end_server, start_server


@pytest.mark.timeout(300)
def test_emulated_workers_are_forked(tmp_path: Path) -> None:
    """All that they need is there in this version of transformers, and leaves one thread, although
    scikit-learn imports pandas, and that Arrow."""
    (tmp_path / "own").mkdir()
    log = tmp_path / "log"
    server = start_server(str(tmp_path / "own" / "s"), PRELOAD, threads=1, log=log)
    try:
        assert until(lambda: "serving" in log.read_text() or server.poll() is not None, 60)
    finally:
        end_server(server)
    said = log.read_text()
    assert "serving, preloaded" in said and "cannot preload" not in said, said
