"""Attention by packages that are not PyTorch's: what each is called, and getting it ready."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from workloads.base import JobDescription, Refusal, Unsupported
from workloads.devices import device_spec

#: The package behind each implementation that is not PyTorch's.
PACKAGES = {"flash_attention_2": "flash-attn", "xformers": "xformers"}


def refusals(asked: JobDescription) -> Iterator[Refusal]:
    """Objections to attention by a package that has no kernels for the device. Pure."""
    attention = str(asked.parameters.get("attention", ""))
    if attention in PACKAGES and not device_spec(asked.device).can(attention):
        yield Refusal(
            setting="attention",
            reason=f"{attention} has no {asked.device} kernels",
            hint="write attention: sdpa",
            unsupported=True,
        )


def make_ready(attention: str) -> None:
    """Make an implementation one that transformers loads models with.

    Raises:
        Unsupported: its package is not installed.
    """
    package = PACKAGES.get(attention)
    if package and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise Unsupported(
            f"attention {attention} needs the package '{package}', which is not "
            f"installed here; install it with: pip install {package}"
        )
    if attention == "xformers":
        from workloads.xformers_attention import register_xformers

        register_xformers()
