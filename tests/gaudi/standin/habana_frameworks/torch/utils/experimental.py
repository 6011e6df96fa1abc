"""The kind of this card."""

from enum import Enum

import habana_frameworks.torch.hpu as hpu

__all__ = ["hpu"]


class synDeviceType(Enum):
    synDeviceGaudi = 1
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> synDeviceType:
    return synDeviceType.synDeviceGaudi2
