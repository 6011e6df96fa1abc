"""A real card: the memory of a worker that was killed or stopped is free before the next one takes
the card, and the worker has the card that it was given.

Skipped where there is no card. On a machine that has one (`--extras quant,gpu,dev` of the kit that
brings Nightgrid to a machine without a registry, then in its checkout):

    python -m pytest tests/workloads/devices/test_real_card.py -v

``NIGHTGRID_TEST_CARD=cpu`` takes the host for a card, to try the test itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import holding_worker
import pytest
from holding_worker import FOUND, HOLDS, MARK

from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import Failure, FailureClass, WorkerInfo
from orchestrator.core.topology import Card
from orchestrator.worker.process import WorkerProcess
from orchestrator.worker.protocol import Start, WorkerConfig
from orchestrator.worker.spawn import OwnSpawner
from workloads.devices import device_class, environment_for
from workloads.devices.monitor.host import SLACK_BYTES, CardUse, idle_memory_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 2**20
#: Share of a card's memory that a worker holds here.
SHARE = 0.5
HOST_HOLDS = 512 * MIB
MARKED = f"card-{os.getpid()}"


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
        if self.accelerator is Accelerator.CPU:
            return holding_worker.use_of_host(self.index)
        found = device_class(self.device).use(self.index)
        assert found is not None
        return found

    def process(self, factory: str = "HoldingWorker") -> WorkerProcess:
        self.count += 1
        environment = environment_for(self.device, self.index)
        variable = self.accelerator.spec.visible_variable
        config = WorkerConfig(
            worker_id=f"w{self.count}",
            card=Card(node_id="n", index=self.index, accelerator=self.accelerator),
            node_name="here",
            emulated=False,
            idle_memory_bytes=self.idle_bytes,
            environment={variable: str(self.index)} if variable else {},
        )
        environment |= {
            HOLDS: str(self.holds_bytes),
            FOUND: str(self.directory / f"found-{self.count}"),
            MARK: MARKED,
        }
        return WorkerProcess(
            Start(
                worker_id=config.worker_id,
                server=self.server,
                factory=f"holding_worker:{factory}",
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
        visible = "" if self.accelerator is Accelerator.CPU else str(self.index)
        assert info.visible_cards == visible and info.device_name
        return process, info

    def found(self) -> int:
        """Bytes that the last worker found in use on the card, just before it took it."""
        return int(json.loads((self.directory / f"found-{self.count}").read_text())["taken"])


def idle_card() -> RealCard | None:
    """A card of this machine that nobody uses."""
    if os.environ.get("NIGHTGRID_TEST_CARD") == "cpu":
        os.environ[MARK] = MARKED
        return RealCard(Accelerator.CPU, 0, idle_bytes=0, holds_bytes=HOST_HOLDS)
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
    torch_device = "cpu" if card.accelerator is Accelerator.CPU else card.device
    environment = environment_for(card.device, card.index) | {MARK: MARKED}
    holder = subprocess.Popen(
        [sys.executable, "-c", text.format(card.holds_bytes, torch_device)],
        env=os.environ | environment,
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
    if card.accelerator is Accelerator.CPU:
        pytest.skip("the host has no variable by which it is seen")
    process = card.process("TamperingWorker")
    try:
        failure = process.start()
        assert isinstance(failure, Failure) and "should be" in failure.message, failure
    finally:
        process.stop("the end")
