"""Refusals: objections of a workload's rules to a job, before anything is loaded. Pure, no torch.

Two kinds of refusal. A job that contradicts itself (a rank of 0, a batch that cannot be divided, a
technique without an object) is a mistake in the grid, which then starts nothing and points at the
value. A job that makes sense but cannot run on a device becomes a row that says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workloads.errors import BadConfiguration, Unsupported

if TYPE_CHECKING:
    from workloads.devices import DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A job as rules see it: what was asked for, and the kind of device it would run on."""

    model: str
    dataset: str
    precision: str
    device: str  # by its name, as in ``workloads/devices``
    batch_size: int | str  # per card; text: it is searched for
    cards: int
    parameters: Mapping[str, Any]  # the workload's own, all of them
    engine: str

    @property
    def on(self) -> DeviceSpec:
        """Declaration of the device: rules ask it what it can, and never for its name."""
        from workloads.devices import device_spec

        return device_spec(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Reason why a job is refused, and the setting to blame."""

    setting: str  # a field of the job or a parameter: the grid's file is pointed at there
    reason: str
    hint: str = ""  # what would be right
    #: True: it makes sense and cannot run on this device, so it becomes a row. False: it is wrong
    #: everywhere, so the grid is refused.
    unsupported: bool = False


def require(refusals: Sequence[Refusal]) -> None:
    """For the process that is about to run a job.

    Raises:
        BadConfiguration: the job contradicts itself.
        Unsupported: it cannot run on this device.
    """
    for refusal in sorted(refusals, key=lambda refusal: refusal.unsupported):
        hint = f"; {refusal.hint}" if refusal.hint else ""
        text = f"{refusal.setting}: {refusal.reason}{hint}"
        raise Unsupported(text) if refusal.unsupported else BadConfiguration(text)
