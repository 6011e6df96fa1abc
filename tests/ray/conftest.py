"""One emulated cluster and one executor for all tests here: starting them takes ten seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_bench import Bench, emulated_node

from orchestrator.job import Accelerator
from orchestrator.on_ray.cluster import emulate
from orchestrator.on_ray.executor import RayExecutor


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A mixed emulated cluster: half of a Gaudi server, two GPUs, one CPU node."""
    here = str(Path(__file__).parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))  # for Ray's processes
    sys.path.insert(0, here)
    nodes = [
        emulated_node("hpu-1", Accelerator.HPU, (4, 5, 6, 7), 8),
        emulated_node("gpu-1", Accelerator.GPU, (0, 1), 2),
        emulated_node("cpu-1", Accelerator.CPU, (0,), 1),
    ]
    try:
        with emulate(nodes) as cluster:
            executor = RayExecutor(
                run="test",
                factory="fake_workers:FakeWorker",
                preload=False,
                log_dir=tmp_path_factory.mktemp("logs"),
            )
            try:
                yield Bench(cluster=cluster, executor=executor)
            finally:
                executor.close()
    finally:
        sys.path.remove(here)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
