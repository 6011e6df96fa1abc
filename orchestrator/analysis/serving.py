"""Served models under load: curves over the load, their Pareto front, knees, and what tokens cost.

A curve is one setting of servers under several loads. Along it, throughput grows and each user's
tokens come slower; the front holds the points that no other of the same work beats in both
(tokens/s per card, tokens/s per user). The knee of a curve is the load with the most throughput for
its latency (Kleinrock's power); beyond it, requests mostly wait.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.analysis.rankings import work_of
from orchestrator.analysis.selection import Setting
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.grid.vocabulary import PricesBlock
from workloads.serving.statistics import SLO_NAMES, parse_slo
from workloads.util.statistics import pareto

#: Settings that are the load itself, and those that change no figure of a point.
LOADS = ("concurrency", "request_rate")
_BESIDE = (*LOADS, "requests", "slo", "arrivals")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load of one setting."""

    row: Measurement
    load: float  # requests in flight, or requests a second
    per_card: float  # generated tokens/s
    per_user: float | None  # tokens/s; None without streaming
    cost: float | None  # of a million generated tokens
    flagged: bool = False  # it is on no front, and never best

    @property
    def latency_s(self) -> float | None:
        """Median time of a request."""
        return self.row.reported("latency_p50_s")

    def figure(self, name: str) -> float | None:
        """The p90 of a latency (``ttft_s``), else its median."""
        stem = name.removesuffix("_s")
        ninety = self.row.reported(f"{stem}_p90_s")
        return self.row.reported(f"{stem}_p50_s") if ninety is None else ninety

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """Return whether it is not flagged and within limits on ``figure``, by name."""
        figures = ((self.figure(name), most) for name, most in limits.items())
        return not self.flagged and all(it is not None and it <= most for it, most in figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One setting of servers under several loads of one kind."""

    name: str  # what sets it apart from the other curves of its work
    load_name: str  # of ``LOADS``
    points: tuple[Point, ...]  # by load

    @property
    def knee(self) -> Point | None:
        """The point with the most throughput for its latency; None on fewer than three."""
        timed = [point for point in self.points if point.latency_s and not point.flagged]
        if len(timed) < 3:
            return None
        return max(timed, key=lambda point: point.per_card / (point.latency_s or math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The setting with the most tokens/s per card within limits."""

    limits: str  # as text; "": none
    curve: Curve | None  # None: no point keeps them
    point: Point | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One piece of served work on one kind of card."""

    setting: Setting  # without engine, cards and load
    about: str  # lengths of prompts and answers, and what sets it apart from the other works
    curves: tuple[Curve, ...]
    front: tuple[Point, ...]  # from the slowest user's tokens to the fastest
    best: tuple[Best, ...]
    currency: str = ""  # "": no prices


def served_of(
    rows: Iterable[Measurement],
    settings: Mapping[str, Setting],
    prices: PricesBlock | None = None,
    fit: Container[str] | None = None,
) -> tuple[Served, ...]:
    """Return one entry for each piece of served work, in the order of the rows; all but those of
    the jobs ``fit`` are flagged (None: none is)."""
    works: dict[tuple[Setting, str], list[Point]] = {}
    for row in rows:
        load_name = next((name for name in LOADS if row.parameters.get(name)), None)
        rate = row.reported("output_tokens_per_s")
        if row.state is State.SUCCEEDED and load_name is not None and rate:
            setting = work_of(settings[row.job_id])
            left = tuple(pair for pair in setting.parameters if pair[0] not in _BESIDE)
            key = (replace(setting, cards=0, parameters=left), load_name)
            point = Point(
                row=row,
                load=float(row.parameters[load_name] or 0),
                per_card=rate / row.cards,
                per_user=row.reported("tokens_per_s_per_user"),
                cost=cost_of(row, rate, prices),
                flagged=fit is not None and row.job_id not in fit,
            )
            works.setdefault(key, []).append(point)
    abouts = _abouts([setting for setting, _ in works])
    return tuple(
        _served(setting, load_name, points, settings, prices, abouts[setting])
        for (setting, load_name), points in works.items()
    )


def _abouts(works: Sequence[Setting]) -> dict[Setting, str]:
    values: dict[str, set[str]] = {}
    for work in works:
        for name, value in work.parameters:
            values.setdefault(name, set()).add(value)
    abouts = {}
    for work in works:
        given = dict(work.parameters)
        prompts = given.pop("input_tokens", "") or f"{given.get('trace') or work.dataset}'s"
        texts = [f"{prompts} → {given.pop('output_tokens', '?')} tokens"]
        texts += [
            f"{name.replace('_', ' ')} {value}"
            for name, value in given.items()
            if len(values[name]) > 1 and value not in ("", "0", "1", "false")
        ]
        abouts[work] = ", ".join(texts)
    return abouts


def cost_of(row: Measurement, tokens_per_s: float, prices: PricesBlock | None) -> float | None:
    """Return the cost of a million tokens: hours of the cards, and their energy where it is known.
    None if the card has no price, or is emulated. Names of cards match in parts."""
    if prices is None or row.emulated or tokens_per_s <= 0:
        return None
    hours, name = prices.card_hour, (row.device_name or str(row.accelerator)).casefold()
    if not isinstance(hours, dict):
        hours = {"default": hours}
    named = (price for part, price in hours.items() if part.casefold() in name)
    hour = next(named, hours.get("default"))
    if hour is None:
        return None
    power_kw = (row.metrics.power_w or 0.0) / 1000
    an_hour = row.cards * hour + power_kw * prices.kwh
    return an_hour / (tokens_per_s * 3600) * 1e6


def _served(
    setting: Setting,
    load_name: str,
    points: Sequence[Point],
    settings: Mapping[str, Setting],
    prices: PricesBlock | None,
    about: str,
) -> Served:
    groups: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point in points:  # by the settings of a server, and those of its model
        row, own = point.row, settings[point.row.job_id]
        choices = (
            *(("engine", own.engine), ("precision", row.precision), ("cards", str(row.cards))),
            *(pair for pair in own.parameters if pair[0] not in _BESIDE),
        )
        groups.setdefault(choices, []).append(point)
    apart = _names_apart(groups)
    curves = []
    for choices, group in groups.items():
        texts = [
            value if name in ("engine", "precision") else f"{name}={value}"
            for name, value in choices
            if name in apart
        ]
        curves.append(
            Curve(
                name=" ".join(texts) or choices[0][1],
                load_name=load_name,
                points=tuple(sorted(group, key=lambda point: point.load)),
            )
        )
    streamed = [point for point in points if point.per_user and not point.flagged]
    front = pareto(streamed, lambda point: (point.per_user or 0.0, point.per_card))
    return Served(
        setting=setting,
        about=about if load_name == "concurrency" else f"{about}, open loop",
        curves=tuple(curves),
        front=tuple(reversed(front)),
        best=tuple(_best(curves, parse_slo(points[0].row.parameters.get("slo")))),
        currency=prices.currency if prices and any(p.cost is not None for p in points) else "",
    )


def _names_apart(groups: Iterable[Sequence[tuple[str, str]]]) -> list[str]:
    """Return the settings that differ, without layouts over cards that follow from their number."""
    given = [dict(choices) for choices in groups]
    names = []
    for name in dict.fromkeys(name for choices in given for name in choices):
        pairs = {(choices["cards"], choices[name]) for choices in given if name in choices}
        follows = name.endswith("_parallel") and len(pairs) == len({cards for cards, _ in pairs})
        if len({value for _, value in pairs}) > 1 and not follows:
            names.append(name)
    return names


def _best(curves: Sequence[Curve], slo: Mapping[str, float]) -> Iterable[Best]:
    """Yield the best point without a limit, under each limit, and under all of them."""
    questions: list[Mapping[str, float]] = [{}, *({n: limit} for n, limit in slo.items())]
    if len(slo) > 1:
        questions.append(slo)
    for limits in questions:
        able = [(curve, point) for curve in curves for point in curve.points if point.keeps(limits)]
        curve, point = max(able, key=lambda pair: pair[1].per_card, default=(None, None))
        text = ", ".join(f"{SLO_NAMES[name]} ≤ {limit:g} s" for name, limit in limits.items())
        yield Best(limits=text, curve=curve, point=point)
