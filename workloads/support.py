"""One cell of the tables of precisions: how a precision is done on a device, or why it is not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Support of a precision on a device: how it is done, or why it cannot be."""

    supported: bool
    means: str = ""  # how weights are stored and multiplied, when supported
    reason: str = ""  # why not, when unsupported
    packages: tuple[str, ...] = ()  # what it needs installed, beyond torch and transformers


def supported(means: str, *packages: str) -> Support:
    """A precision that a device has, and the packages that it needs there."""
    return Support(supported=True, means=means, packages=packages)


def unsupported(reason: str) -> Support:
    """A precision that a device lacks."""
    return Support(supported=False, reason=reason)
