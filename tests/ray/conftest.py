"""One emulated cluster and one executor for all tests here: starting them takes ten seconds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command_line import nightgrid  # noqa: F401 - a fixture
from ray_bench import Bench, emulated_node

from orchestrator.core.job import Accelerator
from orchestrator.on_ray import claims
from orchestrator.on_ray.executor import RayExecutor
from orchestrator.on_ray.local_cluster import emulate


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A mixed emulated cluster: half of a Gaudi server, two GPUs, one CPU node. A node that was
    lost is claimed anew after a second, one that died is known to be after 2.5 s, not 15, and
    figures are exported every three seconds, not every ten."""
    here = str(Path(__file__).parent)
    nodes = [
        emulated_node("hpu-1", Accelerator.HPU, (4, 5, 6, 7), 8),
        emulated_node("gpu-1", Accelerator.GPU, (0, 1), 2),
        emulated_node("cpu-1", Accelerator.CPU, (0,), 1),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", here, prepend=os.pathsep)  # for Ray's processes
        patch.syspath_prepend(here)
        patch.setenv("RAY_metrics_report_interval_ms", "3000")
        patch.setenv("RAY_health_check_period_ms", "500")
        patch.setattr(claims, "RETRY_S", 1.0)
        before = {each.laddr.port for each in psutil.Process().net_connections("inet")}
        with emulate(nodes) as cluster:
            executor = RayExecutor(
                run="test",
                factory="fake_workers:FakeWorker",
                preload=(),
                log_dir=tmp_path_factory.mktemp("logs"),
            )
            with contextlib.closing(executor):
                yield Bench(cluster=cluster, executor=executor, ports_before=before)
