"""Figures of a served model from its request table; pure functions over what the client recorded.

Definitions, as vLLM's benchmark has them: *TTFT* is the time from sending to the first token;
*ITL* the gap between two streamed events of a request; *TPOT* a request's time from first to last
token over its tokens less one (AIPerf and GuideLLM call that ITL); *latency* the time from sending
to the end of the response. Non-streamed requests have only a latency.

Steady state only: ``steady_window`` cuts ramp-up and drain. Rates count tokens by the time of
their event within the window; latencies are those of requests sent within it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, Metric
from workloads.util.statistics import mean_interval, samples_needed

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

#: Limits of goodput by name, and the figure of a request that each limits.
SLO_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "longest ITL", "latency_s": "latency"}

#: Kinds of errors, which open an error's text: ``timeout: 600 s without an end``.
ERRORS = {
    "timeout": "Requests that took longer than a request may",
    "connection": "Requests whose connection was refused or broke",
    "refused": "Requests that the server refused (HTTP 4xx)",
    "failed": "Requests that the server failed (HTTP 5xx, or an error in the stream)",
    "incomplete": "Responses that ended early, or without any token",
}
#: Not an error: the load's time was up while the request was answered.
CANCELLED = "cancelled"

_PERCENTS = (50, 90, 99)
_LATENCIES = {
    "ttft": ("TTFT", "time from sending to the first token"),
    "itl": ("ITL", "gap between two streamed events of a request"),
    "tpot": ("TPOT", "time per output token after the first, of each request"),
    "latency": ("latency", "time from sending to the end of the response"),
}


#: Requests that a percentile needs: so many would all stay below it in 1 of 100 loads. 459 for p99
#: and 44 for p90, as MLPerf's LoadGen stops early.
least_requests = partial(samples_needed, confidence=0.99)


def _rate(name: str, title: str, unit: str, description: str) -> Metric:
    return Metric(name=name, title=title, unit=unit, description=description, better="higher")


#: Every figure that ``figures`` and ``client_figures`` return, declared for rows and tables.
METRICS: tuple[Metric, ...] = (
    _rate("output_tokens_per_s", "output", "tokens/s", "Generated tokens over the window."),
    _rate("total_tokens_per_s", "total", "tokens/s", "Prompts' and generated tokens."),
    _rate("requests_per_s", "requests", "requests/s", "Requests that ended within the window."),
    _rate(
        "tokens_per_s_per_card",
        "per card",
        "tokens/s",
        "Generated tokens over the window and the cards.",
    ),
    _rate(
        "tokens_per_s_per_user",
        "each user",
        "tokens/s",
        "Inverse of the median time per output token (1/TPOT).",
    ),
    *(
        Metric(
            name=f"{name}_{part}_s",
            title=f"{title} {part}",
            unit="s",
            description=f"The {description}: {part}.",
            better="lower",
        )
        for name, (title, description) in _LATENCIES.items()
        for part in ("mean", "p50", "p90", "p99")
    ),
    _rate(
        "goodput_per_s",
        "goodput",
        "requests/s",
        "Requests that kept every limit of slo, over the window.",
    ),
    _rate("within_slo", "within slo", "", "Share of the requests that kept every limit of slo."),
    Metric(
        name="requests_measured",
        title="requests measured",
        description="Requests whose latencies were taken: sent within the window, without error.",
    ),
    *(
        Metric(
            name=f"{name}_tokens_mean",
            title=f"{name} tokens",
            unit="tokens",
            description=f"Mean {name} length of the requests measured, as the server counts.",
        )
        for name in ("input", "output")
    ),
    Metric(
        name="window_s",
        title="window",
        unit="s",
        description="Length of the steady part, without ramp-up and drain.",
    ),
    Metric(
        name="error_share",
        title="errors",
        description="Share of the requests sent within the window that failed.",
        better="lower",
    ),
    *(
        Metric(
            name=f"errors_{kind}",
            title=f"errors: {kind}",
            description=f"{text}, of those sent within the window.",
            better="lower",
        )
        for kind, text in ERRORS.items()
    ),
    Metric(
        name="client_bound",
        title="client bound",
        description="1: the load generator was too slow for its measurement; see the next three.",
        better="lower",
    ),
    Metric(
        name="client_cpu_share",
        title="client CPU",
        description="CPU time of the load generator's process over the load's time.",
        better="lower",
    ),
    Metric(
        name="client_lag_s",
        title="client lag",
        unit="s",
        description="Delay of the load generator's event loop, 90th percentile.",
        better="lower",
    ),
    Metric(
        name="client_late_s",
        title="client late",
        unit="s",
        description="Delay of sending behind the planned time, 90th percentile; open loops only.",
        better="lower",
    ),
)


def parse_slo(limits: object) -> dict[str, float]:
    """Read limits of goodput, such as ``ttft_s=0.5 tpot_s=0.05``. Raises BadConfiguration for an
    unknown name, or a limit that is no number above 0."""
    parts = re.sub(r"\s*=\s*", "=", str(limits or "")).replace(",", " ").split()
    result = {}
    for name, _, value in (part.partition("=") for part in parts):
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in SLO_NAMES or not (number > 0 and math.isfinite(number)):
            raise BadConfiguration(
                f"slo: {name}={value} is no limit; limits are seconds above 0 of "
                f"{', '.join(SLO_NAMES)}"
            )
        result[name] = number
    return result


def steady_window(table: pa.Table, concurrency: int | None) -> tuple[float, float]:
    """Return start and end of the steady part, in seconds from the load's start.

    The rule: a closed loop is steady from the moment when as many requests have ended as were
    sent at once, so that the rush of its start has passed, until the last request is sent, after
    which fewer are in flight. An open loop is steady from the median latency after its first
    request until its last is sent. Fewer than three rounds (closed), or less than half of the
    load's time (open), leave no steady part: then all of it counts.
    """
    sent = table["sent_s"].to_pylist()
    times = zip(sent, table["ended_s"].to_pylist(), strict=True)
    whole_requests = [(start, end) for start, end in times if end is not None]
    if not whole_requests:
        return 0.0, max(sent, default=0.0)
    ended = sorted(end for _, end in whole_requests)
    whole = min(sent), ended[-1]
    if concurrency is None:
        took = sorted(end - start for start, end in whole_requests)
        start, end = min(sent) + took[len(took) // 2], max(sent)
        return (start, end) if end - start >= (whole[1] - whole[0]) / 2 else whole
    if len(ended) < 3 * concurrency:
        return whole
    start, end = ended[concurrency - 1], max(sent)
    return (start, end) if end > start else whole


def figures(
    table: pa.Table,
    window: tuple[float, float],
    slo: Mapping[str, float] | None = None,
    cards: int = 1,
) -> dict[str, float]:
    """Return the figures of the requests within a window, by the names of ``METRICS``.

    The window is in seconds from the load's start (``steady_window``), ``slo`` has limits in
    seconds by ``SLO_NAMES``, and ``cards`` served. A percentile without enough requests
    (``least_requests``) is left out, except p50.
    """
    start, end = window
    span = end - start
    requests = _Requests(table)
    sent = (requests.sent >= start) & (requests.sent <= end)
    good = sent & requests.succeeded
    result = {"window_s": span, "requests_measured": float(good.sum())}
    result |= _errors(requests, sent)
    if span > 0:
        result |= requests.rates(start, end, cards)
    latencies = requests.latencies(good)
    for name, values in latencies.items():
        result |= _distribution(name, values, int(good.sum()))
    for name, tokens in (("input", requests.input_tokens), ("output", requests.output_tokens)):
        known = tokens[good & ~(tokens != tokens)]  # NaN is unequal to itself
        if len(known):
            result[f"{name}_tokens_mean"] = float(known.mean())
    tpot = result.get("tpot_p50_s")
    if tpot:
        result["tokens_per_s_per_user"] = 1 / tpot
    if slo and sent.any():
        kept = requests.within(good, slo)
        result["within_slo"] = kept / float(sent.sum())
        if span > 0:
            result["goodput_per_s"] = kept / span
    return result


def _distribution(name: str, values: np.ndarray, requests: int) -> dict[str, float]:
    import numpy  # lazy: plans read this file

    if not len(values):
        return {}
    result = {f"{name}_mean_s": float(values.mean())}
    for percent in _PERCENTS:
        if percent == 50 or requests >= least_requests(percent):
            result[f"{name}_p{percent}_s"] = float(numpy.percentile(values, percent))
    return result


def _errors(requests: _Requests, sent: np.ndarray) -> dict[str, float]:
    count = int(sent.sum())
    kinds = Counter(
        text.partition(":")[0]
        for text, inside in zip(requests.errors, sent.tolist(), strict=True)
        if inside and text is not None
    )
    kinds.pop(CANCELLED, None)
    known = {f"errors_{kind}": float(kinds[kind]) for kind in ERRORS if kinds[kind]}
    return {"error_share": sum(kinds.values()) / count if count else 0.0, **known}


class _Requests:
    """A request table as arrays; times in seconds from the load's start, NaN where null."""

    def __init__(self, table: pa.Table) -> None:
        import numpy  # lazy: plans read this file

        def column(name: str) -> np.ndarray:
            filled = [math.nan if v is None else v for v in table[name].to_pylist()]
            return numpy.asarray(filled, dtype=float)

        self.errors: list[str | None] = table["error"].to_pylist()
        self.succeeded = numpy.asarray([error is None for error in self.errors], dtype=bool)
        cancelled = [(error or "").startswith(CANCELLED) for error in self.errors]
        self.sent, self.first, self.ended = map(column, ("sent_s", "first_s", "ended_s"))
        self.input_tokens, self.output_tokens = map(column, ("input_tokens", "output_tokens"))
        self._delivered = self.succeeded | numpy.asarray(cancelled, dtype=bool)
        events = table["token_s"].combine_chunks()
        self._counts = numpy.asarray(events.value_lengths().fill_null(0), dtype=int)
        self._event_s = numpy.asarray(events.flatten(), dtype=float)  # from the request's sending
        tokens = table["tokens_per_event"].combine_chunks().flatten()
        self._tokens = numpy.asarray(tokens, dtype=float)
        self._owner = numpy.repeat(numpy.arange(len(self._counts)), self._counts)

    def rates(self, start: float, end: float, cards: int) -> dict[str, float]:
        """Tokens and requests a second: each token at its event, a prompt at the first one."""
        import numpy

        streamed = numpy.zeros(len(self._counts))
        numpy.add.at(streamed, self._owner, self._tokens)
        # Servers may put several tokens into an event without saying so; the usage has the sum.
        share = numpy.divide(
            self.output_tokens, streamed, out=numpy.ones_like(streamed), where=streamed > 0
        )
        share[~self.succeeded | numpy.isnan(share)] = 1.0
        at = self.sent[self._owner] + self._event_s
        counted = (at > start) & (at <= end) & self._delivered[self._owner]
        output = float((self._tokens * share[self._owner])[counted].sum())
        ended = (self.ended > start) & (self.ended <= end) & self.succeeded
        output += float(numpy.nansum(self.output_tokens[ended & (streamed == 0)]))
        read = numpy.where(numpy.isnan(self.first), self.ended, self.first)
        inside = (read > start) & (read <= end) & self._delivered
        total = output + float(numpy.nansum(self.input_tokens[inside]))
        span = end - start
        return {
            "output_tokens_per_s": output / span,
            "total_tokens_per_s": total / span,
            "requests_per_s": float(ended.sum()) / span,
            "tokens_per_s_per_card": output / span / cards,
        }

    def _tpot(self) -> np.ndarray:
        import numpy

        last = numpy.full(len(self._counts), math.nan)
        ends = numpy.cumsum(self._counts)
        some = self._counts > 0
        last[some] = self.sent[some] + self._event_s[ends[some] - 1]
        after_first = numpy.where(self.output_tokens > 1, self.output_tokens - 1, math.nan)
        tpot: np.ndarray = (last - self.first) / after_first
        # A response in one event has no time between tokens.
        return numpy.where(self._counts > 1, tpot, math.nan)

    def _gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Gaps between neighbouring events of one request, and the request of each."""
        import numpy

        same = self._owner[1:] == self._owner[:-1]
        return numpy.diff(self._event_s)[same], self._owner[1:][same]

    def latencies(self, good: np.ndarray) -> dict[str, np.ndarray]:
        """Latencies of the chosen requests by the names of their metrics."""
        import numpy

        gaps, owner = self._gaps()
        values = {
            "ttft": (self.first - self.sent)[good],
            "itl": gaps[good[owner]] if len(owner) else gaps,
            "tpot": self._tpot()[good],
            "latency": (self.ended - self.sent)[good],
        }
        return {name: array[~numpy.isnan(array)] for name, array in values.items()}

    def within(self, good: np.ndarray, slo: Mapping[str, float]) -> int:
        """Count the chosen requests that keep every limit; a latency that is unknown keeps none,
        except the gaps between tokens of a response that has one token."""
        import numpy

        gaps, owner = self._gaps()
        longest = numpy.zeros(len(self._counts))
        numpy.maximum.at(longest, owner, gaps)
        tpot = numpy.where(self.output_tokens <= 1, 0.0, self._tpot())
        values = {
            "ttft_s": self.first - self.sent,
            "tpot_s": tpot,
            "itl_s": longest,
            "latency_s": self.ended - self.sent,
        }
        kept = good.copy()
        for name, limit in slo.items():
            kept &= values[name] <= limit  # NaN is not
        return int(kept.sum())


def client_figures(
    summary: Mapping[str, Any], measured: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the client's own figures, and judge by its ``Summary`` if they limited the load
    ``measured``.

    A load is client-bound if its generator used more than 85 % of a core, if its event loop was
    late by more than 2 ms and a tenth of the median TPOT, or if an open loop sent later than 10 ms
    and a twentieth of the median TTFT (90th percentiles).
    """
    measured = measured or {}
    wall_s = float(summary["wall_s"])
    share = float(summary["cpu_s"]) / wall_s if wall_s > 0 else 0.0
    lag, late = float(summary["lag_p90_s"]), summary.get("late_p90_s")
    bound = (
        share > 0.85
        or lag > max(0.002, measured.get("tpot_p50_s", 0.0) / 10)
        or (late is not None and late > max(0.010, measured.get("ttft_p50_s", 0.0) / 20))
    )
    result = {"client_bound": float(bound), "client_cpu_share": share, "client_lag_s": lag}
    return result if late is None else {**result, "client_late_s": float(late)}


def is_tight(
    repeats: Sequence[Mapping[str, float]], confidence: float, relative_half_width: float
) -> bool:
    """Tell if throughput and p90 TTFT (p50 without one) are known well enough over the repeats."""
    for names in (("output_tokens_per_s",), ("ttft_p90_s", "ttft_p50_s", "latency_p50_s")):
        name = next((n for n in names if all(n in one for one in repeats)), None)
        if name is None:
            continue
        interval = mean_interval([one[name] for one in repeats], confidence)
        width = interval.relative_half_width if interval else None
        if width is None or width > relative_half_width:
            return False
    return len(repeats) > 1
