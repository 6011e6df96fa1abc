"""A run's figures, scraped from the metrics port of a real Ray node."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from driver_cases import STATUS
from patience import patience, until
from ray_bench import Bench, emulated_node

from orchestrator.core.events import NodeLeft
from orchestrator.core.job import Accelerator, State
from orchestrator.core.status import Rate
from orchestrator.on_ray import gcs
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
    wanted = list(readings_of(status))
    assert {"nightgrid_card_power_w", "nightgrid_failures"} <= {one.name for one in wanted}
    lines: list[str] = []

    def exported() -> bool:
        Publisher().publish(status)  # each time, since Ray forgets a gauge after two reports
        lines[:] = [line for line in scraped(bench).splitlines() if line.startswith(PREFIX)]
        return {one.name for one in wanted} <= {
            line.partition("{")[0].removeprefix(PREFIX) for line in lines
        }

    assert until(exported, 60, every_s=0.3), lines
    for one in wanted:
        tags = {"run": status.run, **one.tags}
        (value,) = [
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"{PREFIX}{one.name}{{")
            and all(f'{name}="{text}"' in line for name, text in tags.items())
        ]
        assert value == pytest.approx(one.value), one


def test_figures_are_published_after_the_time_of_day_was_set_back(monkeypatch) -> None:
    seen: list[float] = []

    class Gauge:
        def __init__(self, name: str, *_: object, **__: object) -> None:
            self.name = name

        def set(self, value: float, _: object) -> None:
            if self.name == "nightgrid_status_at_s":
                seen.append(value)

    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    steady = iter([100.0, 101.0, 106.0])
    publisher = Publisher(clock=lambda: next(steady))
    for at in (9000.0, 1800.0, 1805.0):  # set back by two hours after the first
        publisher.publish(dataclasses.replace(STATUS, at=at))
    assert seen == [9000.0, 1805.0]


TOOL = """\
#!/bin/sh
cat <<END
index, power.draw [W], temperature.gpu, utilization.gpu [%], memory.used [MiB], memory.total [MiB]
0, 400.00, 61, 97, 81920, 143771
END
"""


def test_a_real_node_is_read_and_an_emulated_one_is_not(bench, tmp_path, monkeypatch) -> None:
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
        bench.until(lambda: card in bench.executor.telemetry(), 30)
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
        bench.remove("gpu-9")


#: Should the driver wait for the store: it answers again after so long, or later under load, but
#: before Ray ends its nodes for want of it (60 s).
MOST_S, NODES_LIVE_S = 20.0, 45.0


@pytest.fixture
def frozen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The control store of the bench's cluster, stopped; set once it goes on. A second without an
    answer is silence."""
    monkeypatch.setattr(gcs, "SILENT_AFTER_S", 1.0)
    bench.node("cpu-1")
    directory = str(bench.cluster.directory)
    (server,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() == "gcs_server" and directory in " ".join(process.cmdline())
    ]
    goes_on = threading.Event()

    def thaw() -> None:
        os.kill(server.pid, signal.SIGCONT)
        goes_on.set()

    timer = threading.Timer(min(patience(MOST_S), NODES_LIVE_S), thaw)
    os.kill(server.pid, signal.SIGSTOP)
    timer.start()
    yield goes_on
    timer.cancel()
    thaw()
    bench.until(lambda: not bench.executor.trouble, 60)


def test_a_frozen_control_store_stops_no_work(bench: Bench, frozen: threading.Event) -> None:
    card = bench.node("cpu-1").cards[0]
    before = len(bench.seen)
    while not bench.executor.trouble:
        bench.seen += bench.executor.events(0.5)
        assert not frozen.is_set(), "the loop waited until the control store answered"
    (worker,) = bench.start(card)
    ended = bench.ended(bench.run((card,), [worker], "ok"))
    bench.stop(worker)
    assert not frozen.is_set(), "the loop waited until the control store answered"
    assert ended.outcome.state is State.SUCCEEDED
    left = {event.node_id for event in bench.seen[before:] if isinstance(event, NodeLeft)}
    assert not left & {bench.node(name).node_id for name in ("hpu-1", "gpu-1", "cpu-1")}
