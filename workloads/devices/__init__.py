"""One class per kind of device; everything that differs between them is in there.

``device_for("cuda")`` gives the handle on the one card that a worker process sees. The classes
import torch only when a method needs it, so an executor can ask ``environment_for`` what to set
before the process that will import torch is started.
"""

from __future__ import annotations

import importlib
from typing import cast

from workloads.devices.base import Device
from workloads.errors import BadConfiguration

_CLASSES = {
    "cpu": ("workloads.devices.cpu", "CpuDevice"),
    "cuda": ("workloads.devices.cuda", "CudaDevice"),
    "hpu": ("workloads.devices.hpu", "HpuDevice"),
}


def device_class(name: str) -> type[Device]:
    """The class behind ``cpu``, ``cuda`` or ``hpu``.

    Raises:
        BadConfiguration: there is no such device.
    """
    if name not in _CLASSES:
        raise BadConfiguration(f"no device '{name}'. There is: {', '.join(_CLASSES)}.")
    module, attribute = _CLASSES[name]
    return cast("type[Device]", getattr(importlib.import_module(module), attribute))


def device_for(name: str) -> Device:
    """A handle on this process's card. Opening the card itself waits for the first real use.

    Raises:
        BadConfiguration: there is no such device.
    """
    return device_class(name)()


def environment_for(
    name: str,
    card_index: int,
    *,
    threads: int | None = None,
    kind: str = "",
    cards: int = 1,
    scratch: str | None = None,
) -> dict[str, str]:
    """Variables to set before torch is imported, so that the process sees only its own card.

    Args:
        name: ``cpu``, ``cuda`` or ``hpu``.
        card_index: index of the card on its node (on Gaudi: the module id).
        threads: OpenMP threads of the process; left to the library when None.
        kind: what the process must be for its jobs (``engines.process_kind``).
        cards: of the gang that the process belongs to.
        scratch: a directory of the node's own for what its processes share.

    Raises:
        BadConfiguration: there is no such device.
    """
    return device_class(name).environment(
        card_index, threads=threads, kind=kind, cards=cards, scratch=scratch
    )
