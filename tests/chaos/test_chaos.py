"""Real faults on a real Ray cluster, three emulated servers of eight cards: nothing is lost,
nothing runs twice for nothing, every reason is true, nothing is left behind."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from chaos_cluster import ChaosCluster, small_disk
from chaos_faults import KINDS
from chaos_grids import chaos_grid, jobs_of
from chaos_harness import Night, injected

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20261121
GRID = {"single": 60, "pairs": 6, "nodes": 2}
FIRST_S, EVERY_S = 8.0, 4.0
LIMIT_S = 300.0


def test_a_run_survives_every_kind_of_fault_and_the_death_of_its_driver(tmp_path: Path) -> None:
    """Each kind of fault at least once, in a seeded order, and the driver killed at a seeded
    moment; meanwhile jobs segfault, hang, allocate until refused, and ignore SIGTERM."""
    random_ = random.Random(SEED)
    kinds = [*KINDS, "kill a worker", "kill a worker", "kill a raylet"]
    random_.shuffle(kinds)
    grid = tmp_path / "grid.yaml"
    grid.write_text(chaos_grid(seed=SEED, seconds=(4, 16), **GRID))
    with ChaosCluster() as cluster, small_disk(tmp_path / "results", 16) as disk:
        if disk is None:  # nobody but root may mount one
            kinds.remove("fill the disk")
        night = Night(
            cluster=cluster,
            grid=grid,
            results=tmp_path / "results",
            seed=SEED,
            driver_deaths=[random_.uniform(21.0, 27.0)],
        )
        night.drive([(FIRST_S + EVERY_S * n, kind) for n, kind in enumerate(kinds)], LIMIT_S)
        figures = night.check(jobs=jobs_of(**GRID))
    print(json.dumps(figures, indent=1))
    problems = figures.pop("problems")
    assert not problems, "\n".join([*problems, json.dumps(injected(night.injector.faults))])
    assert set(figures["faults"]) >= set(kinds) | {"kill the driver", "let a row's file rot"}
    assert figures["drivers"] == 2 + figures["drivers_refused_for_room"]
    assert night.rivals_refused == 1
