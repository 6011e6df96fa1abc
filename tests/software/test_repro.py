"""A row's folder runs its job again, in plain calls."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from measurement_factory import with_interval
from measurements import row

from orchestrator.core.errors import NotComparable
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import TOOK
from orchestrator.software.repro import PACKAGES, PROMPTS, SCRIPT, folder_of
from workloads import registry
from workloads.base import MeasureSettings, Request
from workloads.data.datasets import load_examples

ROOT = Path(__file__).resolve().parents[2]
BRIEF = MeasureSettings(warmup=0, min_repeats=2, max_repeats=2)


def a_row(**changes: object) -> Measurement:
    """A row of a tiny encoder, measured on an emulated card."""
    settings: dict[str, object] = {
        "workload": "text-encoding",
        "model": "tiny-bert",
        "dataset": "english-prompts",
        "precision": "fp32",
        "engine": "transformers",
        "batch_size": 2,
        "cards": 1,
        "emulated": True,
        "measure": BRIEF,
        "parameters": registry.find_workload("text-encoding").validate({}, "transformers"),
    }
    return row(0, **settings | changes)


def request_in(script: str) -> Request:
    names: dict[str, object] = {"Request": Request, "MeasureSettings": MeasureSettings}
    exec(re.search(r"^request = Request\(.*?^\)", script, re.M | re.S)[0], names)  # type: ignore[index]
    request = names["request"]
    assert isinstance(request, Request)
    return request


def test_the_request_of_its_script_is_the_jobs() -> None:
    measured = a_row(batch_size=3, precision="bf16")
    request = request_in(folder_of(measured)[SCRIPT])
    assert (request.batch_size, request.precision, request.measure) == (3, "bf16", BRIEF)
    assert {**request.parameters, **request.settings} == dict(measured.parameters)
    assert request.dataset == PROMPTS


def test_a_dataset_that_is_not_here_keeps_its_name() -> None:
    files = folder_of(a_row(dataset="/nowhere/prompts.jsonl"))
    assert PROMPTS not in files
    assert request_in(files[SCRIPT]).dataset == "/nowhere/prompts.jsonl"


def test_it_has_the_prompts_and_the_versions_of_packages_alone() -> None:
    versions = {"torch": "2.13.0+cpu", "python": "3.11.7", "kernel": "6.1", "cpu": "AMD EPYC"}
    files = folder_of(a_row(versions=versions))
    assert files[PACKAGES] == "torch==2.13.0\n"
    contents = [json.loads(line)["content"] for line in files[PROMPTS].splitlines()]
    assert contents == [example.content for example in load_examples("english-prompts")]


def expected(row: Measurement, history: Sequence[Measurement] = ()) -> tuple[float, float]:
    """The ends of what is expected, over the row's figure."""
    ends = re.search(r"= figures.throughput, (.+), (.+)", folder_of(row, history)[SCRIPT])
    assert ends is not None and row.metrics.throughput is not None
    low, high = (float(end) / row.metrics.throughput for end in ends.groups())
    return low, high


def test_what_is_expected_follows_from_both_errors_and_the_noise_between_runs() -> None:
    exact = with_interval(a_row(), 100.0, 0.0, repeats=5)
    assert expected(exact) == pytest.approx((math.exp(-0.0515), math.exp(0.0515)), abs=1e-4)
    rough = with_interval(a_row(), 100.0, 1.0, repeats=5)
    assert expected(rough)[1] > expected(exact)[1]
    chance = random.Random(0)
    nights = [
        replace(
            with_interval(row(number), chance.gauss(100, 0.5), 0.1, repeats=5),
            invocation_id=f"i{night}",
        )
        for night in range(3)
        for number in range(12)
    ]
    place = {name: getattr(nights[0], name) for name in ("device_name", "emulated", "nodes")}
    quiet = replace(exact, **place)
    assert 1.005 < expected(quiet, nights)[1] < expected(quiet)[1]
    assert expected(replace(quiet, nodes=("another",)), nights) == expected(quiet)


def test_a_kind_of_job_that_varies_from_run_to_run_expects_more() -> None:
    chance = random.Random(0)
    spreads = [("transformers", 0.5)] * 12 + [("graph", 20.0)] * 3
    nights = [
        replace(
            with_interval(row(number, engine=engine), chance.gauss(100, spread), 0.1, repeats=5),
            invocation_id=f"i{night}",
        )
        for night in range(2)
        for number, (engine, spread) in enumerate(spreads)
    ]
    steady, moody = expected(nights[0], nights), expected(nights[-1], nights)
    assert steady[1] < 1.05 < 1.2 < moody[1]


def test_a_figure_that_is_a_lower_bound_may_be_exceeded() -> None:
    alone = with_interval(a_row(), 100.0, 0.1, repeats=5)
    beside = replace(alone, processor_wait_share=0.5, processor_cores=0.5)
    assert expected(beside)[0] == expected(alone)[0]
    assert expected(beside)[1] > 1.5 * expected(alone)[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": State.FAILED}, "only a measured row"),
        ({"cards": 2}, "2 cards"),
        ({"details": {TOOK: "tiny from a job"}}, "took what another job saved"),
    ],
    ids=["failed", "gang", "takes"],
)
def test_a_row_that_one_process_cannot_repeat_is_refused(changes, reason) -> None:
    with pytest.raises(NotComparable, match=reason):
        folder_of(replace(a_row(), **changes))


@pytest.mark.slow
def test_its_script_measures_the_job_in_a_fresh_process(tmp_path: Path) -> None:
    for name, text in folder_of(a_row()).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, SCRIPT],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed = r"^[\d.e+]+ \S+ ± [\d.]+% in 2 repeats: (inside|OUTSIDE) what was expected"
    assert re.search(printed, done.stdout, re.M)
