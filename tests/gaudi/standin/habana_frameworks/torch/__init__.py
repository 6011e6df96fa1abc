"""The bridge's package: importing it makes torch know ``hpu``, here as the CPU."""

import habana_frameworks.torch.core as core
import habana_frameworks.torch.hpu as hpu
import torch

from . import device

if not hasattr(torch, "hpu"):
    torch._register_device_module("hpu", hpu)
    torch.hpu = hpu
    device.install()

__all__ = ["core", "hpu"]
