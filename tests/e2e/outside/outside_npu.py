"""A device that computes as the host does, under names of its own."""

from workloads.base import supported
from workloads.devices import DeviceSpec
from workloads.devices.base import Device

SPEC = DeviceSpec(
    name="npu",
    accelerator="NPU",
    title="an outside card",
    summary="Outside card",
    handle=f"{__name__}:NpuDevice",
    ray_resource="NPU",
    precisions={"fp32": supported("float32 weights and products")},
    capabilities=frozenset({"native_eager", "dynamic_shapes"}),
)


class NpuDevice(Device):
    """One card."""

    spec = SPEC
    collective_backend = "gloo"

    def device_name(self) -> str:
        return "outside card"

    def driver_version(self) -> str:
        return "1"
