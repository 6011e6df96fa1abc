"""Taking a card: the process has what it must have, and the card is there, free, its own and sound.

All of it happens before the first job, in every process, so that a card that somebody else holds,
or that computes wrongly, fails here with a reason and not in a job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.topology import Card
from orchestrator.worker.failure_record import one_line
from workloads.base import BadConfiguration, CardFaulty, CardNotAcquired
from workloads.devices import host_device
from workloads.devices.monitor.host import ReleaseWait

if TYPE_CHECKING:
    from workloads.devices.base import Device

_FREE_POLL_S = 0.5  # between two looks at a card that is not free yet


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of a worker, given when it is made; plain values that travel between
    processes."""

    worker_id: str
    card: Card
    node_name: str
    emulated: bool
    emulated_device: str = host_device().name  # the software that drives a card which is not there
    memory_bytes: int | None = None  # of an emulated card: enforced; None: no limit
    idle_memory_bytes: int | None = None  # in use on a card that nobody has; None: not known
    threads: int = 1  # for torch's CPU work
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    #: Variables that the process must have had before torch was imported. The executor sets
    #: them; the worker refuses to start without, since setting them now would come too late.
    environment: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""  # of process (``Job.process_kind``): what was decided before its imports
    passport: bool = False  # whether the first attempt begins with the card's passport

    @property
    def device(self) -> str:
        """The torch device type."""
        return self.emulated_device if self.emulated else self.card.accelerator.device


class CardHolder:
    """The part of a worker that takes its card."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config

    def open_device(self) -> Device:
        """The device of the card, once the card is free; nothing is imported for it before.

        Raises:
            BadConfiguration: the process lacks a variable that had to be set before its imports.
            CardNotAcquired: another process does not leave the card.
        """
        self._verify_environment()
        from workloads.devices import device_for

        device = device_for(self.config.device)
        self.wait_until_free(device)
        return device

    def take(self, device: Device) -> str:
        """Take the card and let it compute something; its product name.

        Raises:
            CardNotAcquired: it is not there or held by another; there is no falling back.
            CardFaulty: it is there, but computes something wrong.
        """
        name = self.acquire(device)
        self._verify_card(device)
        self._preflight(device)
        return name

    def wait_until_free(self, device: Device) -> None:
        """Wait until the last process has left the card and its memory is free.

        Raises:
            CardNotAcquired: it is not free in time; the message names the process or the memory.
        """
        card = self.config.card
        waiting = ReleaseWait(card_index=card.index, idle_bytes=self.config.idle_memory_bytes)
        while (reason := waiting.reason(time.monotonic(), device.use(card.index))) is not None:
            if waiting.is_over(now := time.monotonic()):
                raise CardNotAcquired(f"{card} is not free {waiting.told(now)}: {reason}")
            time.sleep(_FREE_POLL_S)

    def acquire(self, device: Device) -> str:
        """Put something on the card, so that one which is not there, or not ours, shows now and
        not in the first job; the card's product name."""
        import torch

        try:
            device.synchronize()  # first: on Gaudi this is what makes torch know "hpu"
            torch.zeros(1, device=device.torch_device)
            return device.device_name()
        except Exception as error:
            known = device.classify(error)
            if isinstance(known, CardNotAcquired):
                raise known from error
            raise CardNotAcquired(
                f"{self.config.card} cannot be used: {one_line(str(error)) or repr(error)}"
            ) from error

    def _preflight(self, device: Device) -> None:
        """Have a card that computes wrongly found out before the first job, in every process: what
        broke the last one may have been the card."""
        try:
            device.preflight()
        except CardFaulty as error:
            raise CardFaulty(f"{self.config.card} is faulty: {error}") from error
        except Exception as error:
            known = device.classify(error)
            raise CardFaulty(
                f"{self.config.card} cannot compute: {one_line(str(known)) or repr(known)}"
            ) from error
        device.release_memory()

    def _verify_card(self, device: Device) -> None:
        """See that the card which was acquired is the one that was given: a library that changes a
        variable when it is imported gets the process another, and its rows a wrong name."""
        self._verify_environment()
        if (why := device.mismatch(self.config.card.index)) is not None:
            raise CardNotAcquired(f"this process has not got {self.config.card}: {why}")

    def _verify_environment(self) -> None:
        wrong = [
            f"{name} is {os.environ.get(name)!r} and should be {wanted!r}"
            for name, wanted in sorted(self.config.environment.items())
            if os.environ.get(name) != wanted
        ]
        if wrong:
            raise BadConfiguration(
                f"worker {self.config.worker_id} runs in a wrong environment: " + "; ".join(wrong)
            )
