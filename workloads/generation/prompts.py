"""Prompts as every way of batching takes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of this rank: its position in the dataset and its ids."""

    index: int
    ids: tuple[int, ...]
