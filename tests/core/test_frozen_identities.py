"""Job ids of version 0.1.0, frozen: results are found again by them, so none may ever change.

``frozen_identities.jsonl`` was written by that version: jobs of every workload, engine, device,
precision and setting, and all jobs of the shipped grids, each as a grid says it (what is not said
has its default) with its id. Lines may be added for settings of later versions, never changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.core.job import Job
from orchestrator.grid.parser import parse_grid
from orchestrator.grid.vocabulary import FIELD_NAMES, Vocabulary
from workloads.registry import WORKLOADS

FROZEN = [
    json.loads(line)
    for line in Path(__file__).with_name("frozen_identities.jsonl").read_text("utf-8").splitlines()
]
#: Without rules: what runs nowhere has an id as well.
VOCABULARY = replace(
    Vocabulary.installed(check_data=False),
    workloads={name: replace(entry, refuse=None) for name, entry in WORKLOADS.items()},
)


def read(said: Mapping[str, Any]) -> Job:
    """The one job of a grid that says this."""
    removed = {name: said[name] for name in VOCABULARY.removed_settings() if name in said}
    grid = {"name": "frozen", "experiments": [{"name": "one", **said}]}
    for name in removed:  # a row has it still
        del grid["experiments"][0][name]
    (job,) = parse_grid(json.dumps(grid).encode(), "grid", vocabulary=VOCABULARY).jobs()
    return replace(job, parameters=tuple(sorted((dict(job.parameters) | removed).items())))


def test_no_job_id_of_an_earlier_version_has_changed() -> None:
    """Every frozen job still has its id, as a grid says it and as a grid is read anew."""
    changed = [line for line in FROZEN if read(line["job"]).job_id != line["job_id"]]
    assert not changed


def test_the_table_is_about_everything_that_a_grid_could_set() -> None:
    """Each workload, engine, card and setting of version 0.1.0 occurs with another value than its
    default, so that a change of its place in the identity shows."""
    assert len(FROZEN) == len({line["job_id"] for line in FROZEN}) > 400
    said: dict[str, set[str]] = {}
    for line in FROZEN:
        said.setdefault(line["job"]["workload"], set()).update(set(line["job"]) - set(FIELD_NAMES))
    counted = {workload: len(names) for workload, names in said.items()}
    assert counted == {
        "text-generation": 11,
        "verification": 5,
        "fp8-calibration": 2,
        "finetuning": 36,
    }
    fields = {name for line in FROZEN for name in line["job"] if name in FIELD_NAMES}
    assert fields == set(FIELD_NAMES)
