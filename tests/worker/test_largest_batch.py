"""``batch_size: max`` and ``best`` on emulated cards whose memory really runs out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import patience

HERE = Path(__file__).parents[1]
CAP = 24
CARD_MEMORY_BYTES = 90 * 10**6


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of both searches, from worker processes with a limit, as JSON."""
    home = tmp_path_factory.mktemp("searches")
    job = {"input_tokens": 256, "output_tokens": 2, "ignore_eos": True, "prompts": 1}
    sizes = {goal: {goal: {"cap": CAP, "tolerance": 0.25}} for goal in ("max", "best")}
    grid = {
        "name": "night",
        "defaults": {
            "workload": "text-generation",
            "model": "tiny-chatglm3",
            "accelerator": "HPU",
            "precision": "fp32",
            **job,
        },
        "measure": {"warmup": 0, "min_repeats": 1, "max_repeats": 1, "time_limit_s": 5},
        "experiments": [{"name": goal, "batch_size": size} for goal, size in sizes.items()],
    }
    (home / "grid.yaml").write_text(json.dumps(grid))
    done = subprocess.run(
        [sys.executable, str(HERE / "stepped_driver.py"), str(home), str(home / "grid.yaml")],
        capture_output=True,
        text=True,
        timeout=patience(240),
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
        | {"CARD_MEMORY_BYTES": str(CARD_MEMORY_BYTES), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def of(rows: list[dict[str, Any]], goal: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The final row of a search, and those of the sizes that it tried."""
    mine = [row for row in rows if row["asked"].startswith(goal)]
    (final,) = [row for row in mine if row["final"]]
    return final, [row for row in mine if not row["final"]]


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_found(rows: list[dict[str, Any]]) -> None:
    """What did not fit was refused by the kernel and ended as OUT_OF_MEMORY, in a process that was
    replaced; the row says where the search stopped."""
    final, tried = of(rows, "max")
    assert final["state"] == "SUCCEEDED"
    fits, refused = (
        [row["batch_size"] for row in tried if row["state"] == state]
        for state in ("SUCCEEDED", "OUT_OF_MEMORY")
    )
    assert refused and len(fits) + len(refused) == len(tried)
    assert max(fits) == final["batch_size"] < min(refused) <= 1.25 * max(fits) + 1
    told = re.search(r"batch size (\d+) fits and (\d+) does not.*\((\d+) probes\)", final["reason"])
    assert told is not None, final["reason"]
    assert [int(number) for number in told.groups()] == [max(fits), min(refused), len(tried)]


@pytest.mark.slow
def test_the_fastest_batch_is_one_that_fits(rows: list[dict[str, Any]]) -> None:
    """Sizes that do not fit are left out, and the row says which sizes were tried."""
    final, tried = of(rows, "best")
    assert final["state"] == "SUCCEEDED"
    assert {row["state"] for row in tried} <= {"SUCCEEDED", "OUT_OF_MEMORY"}
    fits = {row["batch_size"] for row in tried if row["state"] == "SUCCEEDED"}
    assert final["batch_size"] in fits and len(fits) >= 2
    assert f"batch size {final['batch_size']} is the fastest of" in final["reason"]
