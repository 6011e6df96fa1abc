"""A run's figures, scraped from the metrics port of a real Ray node."""

from __future__ import annotations

import dataclasses
import time
import urllib.request

import pytest
from driver_cases import STATUS
from patience import patience
from ray_bench import Bench

from orchestrator.core.status import Rate
from orchestrator.on_ray.metrics import PREFIX, Publisher, readings_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def scraped(bench: Bench) -> str:
    import ray

    mine = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == mine]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=patience(10)) as answer:
        return str(answer.read().decode())


def test_the_figures_of_a_status_are_exported_by_ray(bench: Bench) -> None:
    card = dataclasses.replace(STATUS.cards[0], power_w=412.5, memory_used_bytes=2**30)
    status = dataclasses.replace(
        STATUS,
        cards=(card, *STATUS.cards[1:]),
        rates=(Rate(unit="tokens/s", per_s=1204.5, jobs=3),),
        failure_counts={"crash": 2},
        jobs_run=13,
    )
    Publisher().publish(status)
    wanted = list(readings_of(status))
    assert {"nightgrid_card_power_w", "nightgrid_failures"} <= {one.name for one in wanted}
    deadline = time.monotonic() + patience(60)
    while True:
        text = scraped(bench)
        if all(f"{PREFIX}{one.name}{{" in text for one in wanted):
            break
        assert time.monotonic() < deadline, f"not exported: {text[-2000:]}"
        time.sleep(1.0)
    lines = [line for line in text.splitlines() if line.startswith(f"{PREFIX}nightgrid_")]
    for one in wanted:
        tags = {"run": status.run, **one.tags}
        (value,) = [
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"{PREFIX}{one.name}{{")
            and all(f'{name}="{text}"' in line for name, text in tags.items())
        ]
        assert value == pytest.approx(one.value), one
