"""A worker whose job is one exchange after the other with the other rank of its gang, over hccl."""

from __future__ import annotations

import time
from typing import Any

from scripted_worker import ScriptedWorker

from orchestrator.core.events import Progress
from orchestrator.core.outcome import Attempt, RankOutcome
from workloads.bench import collective
from workloads.devices import device_for

#: Of every wait, where the transport knows one.
LIMIT_S = 2.0


class HcclWorker(ScriptedWorker):
    """Tells the phase "measure" once the ranks have exchanged something."""

    listener: collective.Listener | None = None
    exchanged = False

    def listen(self, address: str) -> collective.Rendezvous:
        self.listener = collective.listen(address, 2, LIMIT_S)
        return self.listener.rendezvous

    def run(self, attempt: Attempt, rank: int, rendezvous: Any) -> RankOutcome:
        import torch
        import torch.distributed as dist

        device = device_for("hpu")
        device.synchronize()
        together = collective.joined(
            rendezvous=rendezvous, rank=rank, world_size=2, device=device, listener=self.listener
        )
        with together:
            while True:
                dist.all_reduce(torch.ones(4, device=device.torch_device))
                self.exchanged = True
                time.sleep(0.01)

    def progress(self) -> Progress | None:
        phase: Any = "measure" if self.exchanged else "start"
        return Progress(worker_id=self.config.name, attempt_id="a-1", phase=phase)
