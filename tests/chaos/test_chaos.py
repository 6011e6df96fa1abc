"""Real faults on a real Ray cluster of two emulated servers; `make rehearsal` has hundreds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import chaos_faults
import chaos_files
import pytest
from chaos_clock import stepped_clock
from chaos_cluster import ChaosCluster
from chaos_harness import Night
from chaos_plan import (
    ALL_AT_ONCE,
    KINDS,
    NEED_SMALL_DISKS,
    ON_A_FULL_DISK,
    ROT,
    chaos_grid,
    injected,
    jobs_of,
)
from small_disks import mounted_disk

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20261121
MIB = 2**20
GRID = {"single": 40, "pairs": 6, "nodes": 2}
FIRST_S, EVERY_S = 6.0, 2.0
LIMIT_S, FAULTS_UNTIL_S = 300.0, 150.0
#: Kinds that take too long for here; `make rehearsal` has them.
TOO_LONG = (
    *(kind for kind in KINDS if KINDS[kind].heavy),
    "freeze a raylet",
    "open a copied run",
    ALL_AT_ONCE,
    "kill the driver under its supervisor",
)
#: Seconds for which faults last here; two to three times as long in the rehearsal.
SHORTER = {"DRIVER_FROZEN_S": 8.0, "STEPPED_S": 8.0, "FULL_S": 5.0}
LINKS_STAY_S = 15.0
#: One death of a driver, the harder one where a small file system can be mounted.
DEATHS = (ON_A_FULL_DISK, "kill the driver")


def test_a_run_survives_every_kind_of_fault_and_the_death_of_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile jobs print, segfault, hang, allocate until refused, and ignore SIGTERM."""
    for name, seconds in SHORTER.items():
        monkeypatch.setattr(chaos_faults, name, seconds)
    monkeypatch.setattr(chaos_files, "LINKS_STAY_S", LINKS_STAY_S)
    random_ = random.Random(SEED)
    kinds = [kind for kind in KINDS if kind not in (*TOO_LONG, *DEATHS)] + ["kill a worker"] * 2
    random_.shuffle(kinds)
    grid = tmp_path / "grid.yaml"
    grid.write_text(chaos_grid(seed=SEED, seconds=(4, 16), **GRID))
    (tmp_path / "aside").mkdir()
    clock = stepped_clock(tmp_path / "aside")
    if clock is None:  # no C compiler
        kinds.remove("step the clock")
    with (
        mounted_disk(tmp_path / "results", 16 * MIB) as disk,
        mounted_disk(tmp_path / "logs", 16 * MIB) as log_disk,
        ChaosCluster(nodes=2) as cluster,
    ):
        mounted = disk is not None and log_disk is not None  # nobody but root may mount one
        death = next(kind for kind in DEATHS if mounted or kind not in NEED_SMALL_DISKS)
        kinds = [kind for kind in kinds if mounted or kind not in NEED_SMALL_DISKS]
        kinds.insert(4, death)  # early: jobs that hang are waited for anew after it
        night = Night(
            cluster=cluster,
            grid=grid,
            results=tmp_path / "results",
            log_dir=tmp_path / "logs",
            aside=tmp_path / "aside",
            seed=SEED,
            clock=clock,
            say=print,
        )
        night.drive(
            [(FIRST_S + EVERY_S * n, kind) for n, kind in enumerate(kinds)],
            limit_s=LIMIT_S,
            faults_until_s=FAULTS_UNTIL_S,
        )
        figures = night.check(jobs=jobs_of(**GRID))
    print(json.dumps(figures, indent=1))
    problems = figures.pop("problems")
    assert not problems, "\n".join([*problems, json.dumps(injected(night.injector.faults))])
    assert set(figures["faults"]) >= {*kinds, ROT}
    refused = figures["drivers_refused_for_room"] + figures["drivers_refused_without_head"]
    assert figures["drivers"] == 2 + refused
    assert figures["rivals_refused"] == 1
