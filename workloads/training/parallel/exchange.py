"""Exposed communication time: the part that computing does not hide.

``Stamped`` stamps in-order collectives before and after, on accelerators in the card's queue;
``Overlapped`` reads DDP's own statistics. The seconds are part of the forward, backward or
optimizer's time.
"""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from workloads.base import Unsupported

if TYPE_CHECKING:
    from workloads.devices.base import Device

#: DeepSpeed's collectives: methods of its backend.
_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


class Exchange:
    """One way in which the cards of a gang exchange what they computed."""

    def begin_step(self) -> None:
        """Forget what came before."""

    def waited_s(self) -> float | None:
        """Seconds waited since ``begin_step``, after ``synchronize``; None if unknown."""


class Stamped(Exchange):
    """Times collectives by stamps before and after."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pairs: list[tuple[Any, Any]] = []
        self._depth = 0

    def begin_step(self) -> None:
        self._pairs.clear()

    def waited_s(self) -> float | None:
        return self._device.seconds_in(self._pairs)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Time a collective; nested ones count once."""
        self._depth += 1
        began = self._device.stamp() if self._depth == 1 else None
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._pairs.append((began, self._device.stamp()))

    def watch(self, backend: Any) -> contextlib.ExitStack:
        """Stamp every collective of DeepSpeed's backend until the returned stack is closed."""
        ending = contextlib.ExitStack()
        for name in _COLLECTIVES:
            if hasattr(backend, name):
                setattr(backend, name, self._stamped(getattr(backend, name)))
                ending.callback(delattr, backend, name)  # the class's own is there again
        return ending

    def _stamped(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.timed():
                handle = collective(*args, **kwargs)
            return handle if handle is None else _Handle(handle, self)

        return call


class _Handle:
    """Handle of an asynchronous collective; times only its wait."""

    def __init__(self, handle: Any, stamped: Stamped) -> None:
        self._handle = handle
        self._stamped = stamped

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._stamped.timed():
            return self._handle.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class Overlapped(Exchange):
    """DDP's statistics of its last exchange of gradients."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        wrapper._set_ddp_runtime_logging_sample_rate(1)  # else one step in a hundred

    def waited_s(self) -> float | None:
        """Communication of the last backward pass less what ran beside it."""
        self._wrapper.logger.set_runtime_stats_and_log()
        account = self._wrapper._get_ddp_logging_data()
        whole = float(account.get("backward_comm_time") or 0)  # nanoseconds
        hidden = float(account.get("backward_compute_comm_overlap_time") or 0)
        # DDP has no statistics on devices for which torch has no timer.
        return max(0.0, whole - hidden) / 1e9 if whole else None


#: Release of torch that strategies are tested with.
_TESTED = "2.13"


def require(strategy: str, *names: str) -> None:
    """Raise Unsupported if torch lacks ``module:attribute`` or ``module:function(parameter)``."""
    import torch

    missing = []
    for name in names:
        path, _, parameter = name.rstrip(")").partition("(")
        try:
            thing = pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            thing = None
        if thing is None or (parameter and parameter not in inspect.signature(thing).parameters):
            missing.append(name.replace(":", "."))
    if missing:
        raise Unsupported(
            f"strategy {strategy}: torch {torch.__version__} has no {' and no '.join(missing)}, "
            f"which torch {_TESTED} has; install that or a newer one, or choose another strategy"
        )
