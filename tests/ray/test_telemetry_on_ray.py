"""Cards of a real node are read from outside their workers, and rows learn what they took."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from patience import patience
from ray_bench import Bench, emulated_node

from orchestrator.core.job import Accelerator

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TOOL = """\
#!/bin/sh
cat <<END
index, power.draw [W], temperature.gpu, utilization.gpu [%], memory.used [MiB], memory.total [MiB]
0, 400.00, 61, 97, 81920, 143771
END
"""


def test_a_real_node_is_read_and_an_emulated_one_is_not(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 W for three seconds are 1200 J."""
    (tmp_path / "nvidia-smi").write_text(TOOL)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    node = dataclasses.replace(emulated_node("gpu-9", Accelerator.GPU, (0,), 1), emulated=False)
    bench.cluster.add(node)
    try:
        (card,) = bench.node("gpu-9").cards
        (real,) = bench.start(card)
        (emulated,) = bench.start(bench.node("gpu-1").cards[0])
        deadline = time.monotonic() + patience(30)
        while card not in bench.executor.telemetry():
            assert time.monotonic() < deadline
            bench.seen += bench.executor.events(0.2)
        assert list(bench.executor.telemetry()) == [card]
        assert bench.executor.telemetry()[card].power_w == 400.0
        for seconds in (3, 10, 20):  # where the cores were away for long, no energy is told
            attempts = [
                bench.run((card,), [real], f"sleep:{seconds}"),
                bench.run((bench.node("gpu-1").cards[0],), [emulated], f"sleep:{seconds}"),
            ]
            read, unread = (bench.ended(each).outcome.ranks[0] for each in attempts)
            if read.energy is not None:
                break
        assert read.energy is not None and read.energy.source == "power"
        assert read.energy.energy_j == pytest.approx(400.0 * read.energy.duration_s)
        assert read.energy.duration_s == pytest.approx(seconds, rel=0.2)
        assert unread.energy is None
        assert read.result is not None and unread.result is not None
        assert read.result.details["utilization_percent_mean"] == "97"
        assert read.result.details["peak_card_memory_used_bytes"] == str(81920 * 2**20)
        assert "card_readings" not in unread.result.details
        bench.stop(real, emulated)
    finally:
        bench.cluster.remove("gpu-9")
