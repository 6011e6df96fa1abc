"""A real card: the memory of a worker that was killed or stopped is free before the next one takes
the card, and the worker has the card that it was given.

Skipped where there is no card. On a machine that has one (`--extras quant,gpu,dev` of the kit that
brings Nightgrid to a machine without a registry, then in its checkout):

    python -m pytest tests/workloads/devices/test_real_card.py -v
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import Failure, FailureClass, WorkerInfo
from orchestrator.core.topology import Card
from orchestrator.worker.process import WorkerProcess
from orchestrator.worker.protocol import Start, WorkerConfig
from orchestrator.worker.spawn import OwnSpawner
from orchestrator.worker.worker import CardWorker
from workloads.devices import device_class, environment_for
from workloads.devices.base import Device
from workloads.devices.monitor.host import SLACK_BYTES, CardUse, idle_memory_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Share of a card's memory that a worker holds here.
SHARE = 0.5
#: Bytes that a worker takes, and a file for what it found on its card just before it took it.
HOLDS, FOUND = "NIGHTGRID_TEST_HOLDS", "NIGHTGRID_TEST_FOUND"


class HoldingWorker(CardWorker):
    """Tells what was on the card when it was free, and holds memory from its start on."""

    _kept: Any = None

    def start(self) -> WorkerInfo:
        info = super().start()
        import torch

        assert self.device is not None
        size = int(os.environ[HOLDS])
        self._kept = torch.ones(size, dtype=torch.uint8, device=self.device.torch_device)
        self.device.synchronize()
        return info

    def acquire(self, device: Device) -> str:
        found = device.use(self.config.card.index)
        Path(os.environ[FOUND]).write_text(str(found and found.taken_bytes))
        return super().acquire(device)


class TamperingWorker(HoldingWorker):
    """One in which something changes the visible cards once the right ones are in use."""

    def acquire(self, device: Device) -> str:
        name = super().acquire(device)
        for variable in self.config.environment:
            if "VISIBLE" in variable:
                os.environ[variable] = "7"
        return name


@dataclass
class RealCard:
    """One card, idle now."""

    accelerator: Accelerator
    index: int
    idle_bytes: int
    holds_bytes: int  # what each worker is to take
    server: str = ""
    directory: Path = field(default_factory=Path)
    count: int = 0

    @property
    def device(self) -> str:
        return self.accelerator.device

    def use(self) -> CardUse:
        found = device_class(self.device).use(self.index)
        assert found is not None
        return found

    def process(self, factory: str = "HoldingWorker") -> WorkerProcess:
        self.count += 1
        environment = environment_for(self.device, self.index)
        config = WorkerConfig(
            worker_id=f"w{self.count}",
            card=Card(node_id="n", index=self.index, accelerator=self.accelerator),
            node_name="here",
            emulated=False,
            idle_memory_bytes=self.idle_bytes,
            environment=self.accelerator.spec.visible(self.index),
        )
        environment |= {
            HOLDS: str(self.holds_bytes),
            FOUND: str(self.directory / f"found-{self.count}"),
        }
        return WorkerProcess(
            Start(
                worker_id=config.worker_id,
                server=self.server,
                factory=f"{__name__}:{factory}",
                config=config,
                environments={"": environment},
                log=str(self.directory / f"{self.count}.log"),
            )
        )

    def started(self) -> tuple[WorkerProcess, WorkerInfo]:
        """A worker that came up and holds its share."""
        process = self.process()
        info = process.start()
        assert isinstance(info, WorkerInfo), info
        taken = self.use().taken_bytes
        assert taken is not None and taken >= self.holds_bytes * 0.9, taken
        assert info.visible_cards == str(self.index) and info.device_name
        return process, info

    def found(self) -> int:
        """Bytes that the last worker found in use on the card, just before it took it."""
        return int((self.directory / f"found-{self.count}").read_text())


def idle_card() -> RealCard | None:
    """A card of this machine that nobody uses."""
    for accelerator in (Accelerator.GPU, Accelerator.HPU):
        device = device_class(accelerator.device)
        for index, card in sorted(device.telemetry().items()):
            use = device.use(index)
            idle = idle_memory_bytes(use) if use is not None else None
            if idle is not None and card.memory_total_bytes:
                holds = int(card.memory_total_bytes * SHARE)
                return RealCard(accelerator, index, idle_bytes=idle, holds_bytes=holds)
    return None


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCard]:
    found = idle_card()
    if found is None:
        pytest.skip("no NVIDIA or Gaudi card here, or none is idle")
    found.directory = tmp_path_factory.mktemp("card")
    spawner = OwnSpawner((), threads=1, log=found.directory / "spawner.log")
    found.server = spawner.shared.path
    yield found
    spawner.close()


@pytest.mark.parametrize("end", ["killed", "stopped", "frozen and stopped"])
def test_the_memory_of_a_worker_is_free_before_its_card_is_used_again(card, end) -> None:
    process, info = card.started()
    if end == "killed":
        os.kill(info.pid, signal.SIGKILL)
    else:
        if end != "stopped":
            os.kill(info.pid, signal.SIGSTOP)
        process.stop("as asked")
    began = time.monotonic()
    successor, theirs = card.started()
    print(f"{end}: the next worker was there after {time.monotonic() - began:.1f} s")
    assert theirs.pid != info.pid
    assert card.found() <= card.idle_bytes + SLACK_BYTES
    successor.stop("the end")


def test_a_card_whose_memory_is_held_is_not_taken(card: RealCard) -> None:
    text = "import torch; kept = torch.ones({}, dtype=torch.uint8, device='{}'); print(); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", text.format(card.holds_bytes, card.device)],
        env=os.environ | environment_for(card.device, card.index),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        failure = card.process().start()
        assert isinstance(failure, Failure), failure
        assert failure.failure_class is FailureClass.ACQUIRE
        assert "MiB in use" in failure.message or str(holder.pid) in failure.message
    finally:
        holder.kill()
        holder.communicate()


def test_a_worker_whose_visible_cards_change_does_not_start(card: RealCard) -> None:
    process = card.process("TamperingWorker")
    try:
        failure = process.start()
        assert isinstance(failure, Failure) and "should be" in failure.message, failure
    finally:
        process.stop("the end")
