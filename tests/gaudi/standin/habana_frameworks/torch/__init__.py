"""The bridge's package: importing it makes torch know ``hpu``, here as the CPU."""

import torch

from . import core, device, hpu
from .hpex import uint4

if not hasattr(torch, "hpu"):
    torch._register_device_module("hpu", hpu)
    torch.hpu = hpu
    device.install()

__all__ = ["core", "hpu", "uint4"]
