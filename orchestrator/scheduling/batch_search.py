"""The largest batch size that fits: doubling until one does not, then bisection.

What a batch needs grows with its size, so the sizes that fit are 1..n and n is to be found. The
probes cost a forward pass each while an out-of-memory may cost a worker, hence doubling from
below: at most one failure before the bisection. The history is a mapping from batch size to
whether it fitted; a later verdict on the same size replaces an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping


def largest_fit(history: Mapping[int, bool]) -> int | None:
    """The largest size known to fit and below every size known not to; None if there is none."""
    ceiling = _smallest_misfit(history)
    fits = [size for size, fitted in history.items() if fitted and _below(size, ceiling)]
    return max(fits, default=None)


def next_probe(history: Mapping[int, bool], cap: int) -> int | None:
    """The size to try next, at most ``cap``; None when ``largest_fit`` is the answer.

    Raises:
        ValueError: ``cap`` is below 1.
    """
    if cap < 1:
        raise ValueError(f"the largest batch size to try must be at least 1, not {cap}")
    fit = largest_fit(history) or 0
    misfit = _smallest_misfit(history)
    if misfit is None:
        return None if fit >= cap else min(max(2 * fit, 1), cap)
    return None if misfit - fit <= 1 else (fit + misfit) // 2


def _smallest_misfit(history: Mapping[int, bool]) -> int | None:
    return min((size for size, fitted in history.items() if not fitted), default=None)


def _below(size: int, ceiling: int | None) -> bool:
    return ceiling is None or size < ceiling
