"""The bridge's package: importing it makes torch know ``hpu``, here as the CPU."""

from importlib import metadata

import torch

from .utils.internal import is_lazy

_, _, _local = metadata.version("torch").partition("+")
if is_lazy():
    assert _local.startswith("git"), (
        f"Stock PyTorch version {metadata.version('torch')} is not supported in Lazy mode."
    )

from . import core, device, hpu  # noqa: E402 - as the bridge, it looks at torch first
from .hpex import uint4  # noqa: E402

if not hasattr(torch, "hpu"):
    torch._register_device_module("hpu", hpu)
    torch.hpu = hpu
    device.install()
    core.weight_sharing.install()
    if not is_lazy():  # nobody compiles in lazy mode, and torch's compiler takes a second to import
        torch._dynamo.register_backend(device.compile_graph, name="hpu_backend")

__all__ = ["core", "hpu", "uint4"]
