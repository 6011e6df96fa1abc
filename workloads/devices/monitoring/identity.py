"""Compare the card that a process really has with the one it was given. Pure.

Variables such as ``CUDA_VISIBLE_DEVICES`` are wishes: one that is changed before the device's
library reads it, or an order of cards that is not that of the bus, shows another card, and all that
is measured there would be written down for the wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CardIdentity:
    """Marks that tell a card from all others; empty where unknown."""

    uuid: str = ""  # "GPU-8dcb4b4c-…", with or without its prefix, in any case
    bus_id: str = ""  # "00000000:3B:00.0", with a domain of any length


def difference(has: CardIdentity, given: CardIdentity) -> str | None:
    """Difference between the card that a process has and the one it was given; None where they
    are the same or nobody can tell."""
    for name, one, other in (
        ("UUID", _uuid(has.uuid), _uuid(given.uuid)),
        ("bus id", _bus(has.bus_id), _bus(given.bus_id)),
    ):
        if one and other and one != other:
            return f"it has the card with the {name} {one} and was given {other}"
    return None


def _uuid(text: str) -> str:
    """Without the prefix that NVML has and CUDA has not. The one of a MIG instance is no card's."""
    lower = text.strip().lower()
    return "" if lower.startswith("mig-") else lower.removeprefix("gpu-")


def _bus(text: str) -> str:
    """NVML writes the domain with eight digits, the kernel with four, and some leave it out."""
    parts = text.strip().lower().split(":")
    if len(parts) < 2 or not all(parts):
        return ""
    domain = parts[0] if len(parts) == 3 else "0"
    try:
        number = int(domain, 16)
    except ValueError:
        return ""
    return ":".join([f"{number:04x}", *parts[-2:]])
