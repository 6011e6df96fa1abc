"""Attention by packages that are not PyTorch's: what each is called, and getting it ready."""

from __future__ import annotations

import importlib.util

from workloads.errors import Unsupported

#: The package behind each implementation that is not PyTorch's.
PACKAGES = {"flash_attention_2": "flash-attn", "xformers": "xformers"}


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
