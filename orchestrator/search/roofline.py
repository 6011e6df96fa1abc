"""Prior means of a surrogate: a roofline for times and rates, a plane for all else. Pure.

The time of one step of a model that serves or trains ``b`` sequences on ``n`` cards is

    t(b) = o + s·log2 n + [A + M·(1 − exp(−b/r)) + b·(k·context + f + p·input/output)] / n^a

overhead of a step, communication, reading of the weights (those of experts only as far as the batch
needs them), reading of keys and values, arithmetic of a token, and of the prompt's tokens per
token written. Sequences beyond the memory for keys and values wait: b is at most about
C·n^1.5/context. It is a sum of rooflines with soft corners. Nothing in it is known for certain, not
even on a card with a data sheet, so all logs of its parameters have normal priors and are learned
with the surrogate from the cells measured: near the present values the roofline is linear in them.

The priors were fitted to published measurements of served models on six kinds of card
(``benchmarks/search_replay.py``; the models of one half predict those of the other).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from orchestrator.search.space import Floats, Role, Rows, Space

#: Parameters of the roofline: mean and standard deviation of the natural log, times in seconds.
PARAMETERS: dict[str, tuple[float, float]] = {
    "overhead": (-6.2, 0.7),  # o
    "communication": (-7.9, 0.85),  # s
    "weights": (-4.4, 0.45),  # A
    "experts": (-4.2, 1.0),  # M
    "experts' batch": (3.2, 0.45),  # r
    "cache": (-18.1, 0.9),  # k, per token of context
    "arithmetic": (-8.9, 0.8),  # f, per sequence
    "prompt": (-9.6, 0.65),  # p, per token
    "scaling": (-0.95, 0.45),  # a
    "capacity": (13.5, 1.0),  # C, tokens
    "level": (-0.1, 0.3),  # a factor on all
}
_MEAN, _SPREAD = (np.array(column) for column in zip(*PARAMETERS.values(), strict=True))
_CORNER = 4  # sharpness of the end of memory


class Mean(Protocol):
    """A mean of log values, linear in its parameters near any of their values."""

    @property
    def start(self) -> Floats:
        """Prior means of the parameters, shape (parameters,)."""

    @property
    def spread(self) -> Floats:
        """Their prior standard deviations."""

    def linear(self, parameters: Floats, rows: Rows) -> tuple[Floats, Floats]:
        """Values, shape (rows,), and their derivatives, shape (rows, parameters)."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Log of the seconds of a step, or of a rate in sequences (``rate``), per card or of all."""

    space: Space
    rate: bool = False
    per_card: bool = False
    start: Floats = field(default_factory=_MEAN.copy)
    spread: Floats = field(default_factory=_SPREAD.copy)

    def linear(self, parameters: Floats, rows: Rows) -> tuple[Floats, Floats]:
        """Values and derivatives by the parameters of ``PARAMETERS``, in their order."""
        o, s, weights, experts, r, k, f, p, a, capacity, level = np.exp(parameters)
        roles = (Role.CARDS, Role.LOAD, Role.INPUT, Role.OUTPUT)
        cards, load, tokens_in, tokens_out = (self.space.physical[role][rows] for role in roles)
        context = tokens_in + tokens_out / 2
        log_cards = np.log(cards)
        full = (load * context / (capacity * cards**1.5)) ** _CORNER
        waiting = full / (1 + full)  # derivative of log b by log C
        b = load * (1 + full) ** (-1 / _CORNER)
        share = cards**-a
        absent = np.exp(-b / r)
        parts = {
            "overhead": np.full(len(load), o),
            "communication": s * log_cards / np.log(2),
            "weights": weights * share,
            "experts": experts * (1 - absent) * share,
            "cache": b * k * context * share,
            "arithmetic": b * f * share,
            "prompt": b * p * tokens_in / tokens_out * share,
        }
        total = sum(parts.values())
        per_load = parts["cache"] + parts["arithmetic"] + parts["prompt"]
        touched = experts * share * absent * b / r
        columns = {name: part / total for name, part in parts.items()}
        columns["experts' batch"] = -touched / total
        shared = parts["weights"] + parts["experts"] + per_load
        columns["scaling"] = -a * log_cards * shared / total
        columns["capacity"] = waiting * (per_load + touched) / total
        columns["level"] = np.ones(len(load))
        values = np.log(total) + np.log(level)
        if self.rate:  # those that wait take their turns: the rate is that of b
            values = np.log(b) - values - (log_cards if self.per_card else 0.0)
            columns = {name: -column for name, column in columns.items()}
            columns["capacity"] = columns["capacity"] + waiting
        return values, np.stack([columns[name] for name in PARAMETERS], axis=1)


class Plane:
    """A mean that is linear in the logs of load, lengths and cards: for memory, quality, energy."""

    def __init__(self, space: Space, level: float = 0.0, spread: float = 3.0) -> None:
        roles = (Role.LOAD, Role.INPUT, Role.OUTPUT, Role.CARDS)
        logs = [np.log(space.physical[role]) for role in roles]
        columns = [column - column.mean() for column in logs if np.ptp(column) > 0]
        self._design = np.stack([np.ones(space.size), *columns], axis=1)
        self.start = np.array([level, *(0.0 for _ in columns)])
        self.spread = np.array([spread, *(0.5 for _ in columns)])

    def linear(self, parameters: Floats, rows: Rows) -> tuple[Floats, Floats]:
        """Values and derivatives by level and slopes."""
        design = self._design[rows]
        return design @ parameters, design
