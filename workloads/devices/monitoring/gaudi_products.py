"""The generations of Gaudi cards: what differs between them, in one place.

Memory and ports are those of Intel's data sheets. fp8 in hardware scales by powers of two: Gaudi2
knows four exponent biases, Gaudi3 the whole range (Habana's FP8 guide), so a calibration made for
one is not the other's best and is never carried over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One generation of cards."""

    name: str  # its line in devices.csv
    pattern: str  # how its driver, hl-smi and the bridge call it
    ray_type: str  # in Ray's resource ``accelerator_type:…``
    memory_bytes: int
    fp8_exponent_biases: Sequence[int]  # in hardware; none: no fp8
    internal_ports: int  # of a card, to the other seven of its server; they carry collectives
    scale_out_ports: int  # of a card, to other servers


PRODUCTS = (
    Product(
        name="Gaudi2",
        pattern=r"(Intel[ -])?(Habana )?(HL-225\w*|Gaudi ?2)",
        ray_type="Intel-GAUDI2",
        memory_bytes=96 * _GIB,
        fp8_exponent_biases=(3, 7, 11, 15),
        internal_ports=21,
        scale_out_ports=3,
    ),
    Product(
        name="Gaudi3",
        pattern=r"(Intel[ -])?(Habana )?(HL-325\w*|Gaudi ?3)",
        ray_type="Intel-GAUDI3",
        memory_bytes=128 * _GIB,
        fp8_exponent_biases=range(64),
        internal_ports=21,
        scale_out_ports=3,
    ),
)


def product_of(name: str) -> Product | None:
    """The generation of a card of this name; None for the first one, and for names nobody knows."""
    for product in PRODUCTS:
        if re.fullmatch(product.pattern, name.strip(), re.IGNORECASE):
            return product
    return None


def fp8_scales(name: str) -> str:
    """Scales that a card's hardware applies to fp8 values, for rows."""
    product = product_of(name)
    if product is None:
        return ""
    biases = product.fp8_exponent_biases
    if isinstance(biases, range):
        return f"exponent biases {biases[0]} to {biases[-1]} in hardware ({product.name})"
    return f"exponent biases {', '.join(map(str, biases))} in hardware ({product.name})"
