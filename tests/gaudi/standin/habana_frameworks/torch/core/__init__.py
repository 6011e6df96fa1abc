"""Graph control: there is no graph to cut here. Inference mode is a switch of the process."""

from typing import Any

from .. import hpu
from . import weight_sharing

__all__ = ["hpu", "weight_sharing"]


def mark_step(*_: Any, **__: Any) -> None: ...


def hpu_inference_set_env(model: Any = None) -> Any:
    """Every graph that is compiled from now on carries the attribute, in whatever job."""
    hpu.enable_inference_mode()
    return model


def hpu_inference_initialize(
    model: Any = None, mark_scales: bool = True, mark_non_scales: bool = False
) -> None:
    hpu.enable_inference_mode()
