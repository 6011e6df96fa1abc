"""Check whether the figures of rows are possible.

A failed check gives a sentence with the figure and its limit; unknown facts pass. Limits leave room
for rounded data sheets and clocks read at different moments. Samples and prompts, of which a run
may have millions, are checked as arrays (``Records``); NaN means unknown, and compares as passing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.analysis.hardware import arithmetic_of, flops_per_token, sheet_of
from orchestrator.analysis.samples import Groups, Numbers, Records, floats, largest, whole
from orchestrator.analysis.timeline import duration_s
from orchestrator.core.measurement import Measurement
from orchestrator.store.schema import OUT_OF_RANGE
from orchestrator.util.format import number, percent, plural, seconds, size
from workloads import registry
from workloads.base import END_TOKEN_IDS, Item, Sample
from workloads.util.statistics import percentile

if TYPE_CHECKING:
    import pyarrow as pa

ROUNDING = 1e-3
#: Tolerances of parts against their whole, as clocks are read at different moments.
SHARE, SLACK_S = 0.01, 0.005
#: Tolerances of an attempt's span, taken by wall clock, which may be adjusted.
SPAN_SHARE, SPAN_SLACK_S = 0.05, 2.0
#: Share of a data sheet's limit that is still believed; its figures are rounded.
MOST = 1.02
#: Smaller weights may stay in a card's caches.
CACHED_BYTES = 512 * 2**20
#: Least and most bytes per parameter, including scales and unquantised layers.
BYTES_PER_PARAMETER = (0.25, 8.5)
#: Most operations/s of a processor core: two AVX-512 units in fp32, AMX in fewer bits. Doubled, as
#: input embeddings take no operations.
CORE_FLOPS = {"fp32": 2 * 3e11, "": 2 * 1.5e13}
#: Least share of the timed part that energy must cover; readings at its ends are interpolated.
COVERED = 0.98
#: Mean power as a share of the card's limit: peaks may exceed it, idle power bounds it below.
MOST_POWER, LEAST_POWER = 1.15, 0.02
#: Longest token of any vocabulary in UTF-8 bytes; runs of spaces are the longest.
LONGEST_TOKEN = 256

TOO_MANY = "{:n} tokens/s a card, padding included, are {:%} of {}"

PARTS = (
    *("data_s", "forward_s", "backward_s", "optimizer_s", "encoder_s"),
    *("text_encoding_s", "denoising_s", "decoding_s", "conversion_s"),
)
#: Figures that must not exceed the next.
_ASCENDING = (
    ("throughput_low", "throughput", "throughput_high"),
    ("ttft_s", "ttft_p95_s"),
    ("tpot_p50_s", "tpot_p95_s", "tpot_p99_s"),
    ("latency_p50_s", "latency_p95_s"),
    ("generated_tokens_per_s", "total_tokens_per_s"),
)


# ---------------------------------------------------------------- plain columns


def _own_reasons(row: Measurement) -> Iterator[str]:
    if odd := row.details.get(OUT_OF_RANGE):
        yield f"it has numbers that cannot be: {odd}"
    yield from _figures(row)
    requested = row.batch_size_requested
    if requested.isdecimal() and row.batch_size not in (None, int(requested)):
        yield f"batch_size is {row.batch_size}, {requested} was asked for"
    if (span_s := duration_s(row)) is not None:
        # Everything timed happened between the attempt's start and end.
        load_s = row.load_s or 0.0
        compiled_s = (row.compile_s or 0.0) - load_s  # part of it may have been while loading
        timed = (load_s, max(compiled_s, row.warmup_s or 0.0), row.metrics.measure_s or 0.0)
        parts_s = math.fsum(timed)
        if parts_s > _most_of_span(span_s):
            yield f"loading, warm-up and timed part took {seconds(parts_s)} of {seconds(span_s)}"
    yield from _against_the_sheet(row)
    if row.weight_bytes and row.parameter_count:
        share = row.weight_bytes / row.parameter_count
        low, high = BYTES_PER_PARAMETER
        if not low / row.cards <= share <= high:  # a gang may share them out
            amounts = f"{size(row.weight_bytes)} for {row.parameter_count:,} parameters"
            yield f"{amounts}, {number(share)} B each"
    yield from _energy(row)


def _most_of_span(span_s: float) -> float:
    return max(0.0, span_s) * (1 + SPAN_SHARE) + SPAN_SLACK_S


def _figures(row: Measurement) -> Iterator[str]:
    metrics = row.metrics
    for names in _ASCENDING:
        figures = ((name, getattr(metrics, name)) for name in names)
        known = [(name, value) for name, value in figures if value is not None]
        wrong = (
            f"{name} is {number(value)} and {above} only {number(limit)}"
            for (name, value), (above, limit) in pairwise(known)
            if value > limit * (1 + 1e-9) and not _near(value, limit)
        )
        if first := next(wrong, None):
            yield first
            break
    value, tokens, items = metrics.throughput, metrics.generated_tokens_per_s, metrics.items_per_s
    rates = [rate for rate in (tokens, items) if rate is not None]
    if value is not None and len(rates) == 2 and not any(_near(value, rate) for rate in rates):
        text = f"{number(tokens)} tokens/s and {number(items)} items/s"
        yield f"throughput is {number(value)}, its rates are {text}"
    low, high, stored = metrics.throughput_low, metrics.throughput_high, metrics.relative_half_width
    if value and low is not None and high is not None and stored is not None:
        half = (high - low) / 2 / abs(value)
        if math.isfinite(half) and not _near(half, stored, 0.01):
            yield f"relative_half_width is {number(stored)}, its interval is {number(half)} wide"


def _against_the_sheet(row: Measurement) -> Iterator[str]:
    limit, rate = most_tokens_per_s(row), row.metrics.total_tokens_per_s
    if limit is not None and rate is not None and rate / row.cards > limit[0]:
        most, peak = limit
        rate /= row.cards
        yield TOO_MANY.format(_Number(rate), _Number(MOST * rate / most), peak)
    least_s = least_step_s(row)
    times = {"a decoding step": row.metrics.tpot_p50_s, "a first token": row.metrics.ttft_s}
    for name, took_s in times.items():
        if least_s is not None and took_s is not None and took_s < least_s:
            yield (
                f"{name} took {seconds(took_s)}; reading {size(row.weight_bytes)} of weights takes "
                f"{seconds(least_s)} on {row.device_name}"
            )
            break
    sheet, peak_bytes = sheet_of(row), row.peak_device_memory_bytes
    if sheet is not None and sheet.memory_gb is not None and peak_bytes is not None:
        has = sheet.memory_gb * 2**30  # the largest that a maker's GB may mean
        if peak_bytes > has:
            yield f"{size(peak_bytes)} were allocated on a card that has {size(has)}"


def _energy(row: Measurement) -> Iterator[str]:
    metrics = row.metrics
    power_w, energy_j, measure_s = metrics.power_w, metrics.energy_j, metrics.measure_s
    if power_w and energy_j is not None and measure_s is not None:
        covered = f"its energy is that of {seconds(energy_j / power_w)}"
        span_s = duration_s(row)
        if energy_j / power_w < COVERED * measure_s:
            yield f"{covered}, the timed part took {seconds(measure_s)}"
        elif span_s is not None and energy_j / power_w > _most_of_span(span_s):
            yield f"{covered}, it ran {seconds(span_s)}"
    sheet = sheet_of(row)
    if sheet is not None and sheet.tdp_w is not None and power_w is not None:
        limit_w = sheet.tdp_w * row.cards
        if not LEAST_POWER * limit_w <= power_w <= MOST_POWER * limit_w:
            yield f"its cards drew {number(power_w)} W; their limit is {number(limit_w)} W"


# ---------------------------------------------------------------- limits of the hardware


def most_tokens_per_s(row: Measurement) -> tuple[float, str] | None:
    """Return the most tokens/s (padding included) of a card, and the peak that limits it."""
    sheet = sheet_of(row)
    if sheet is None or not sheet.flops:
        return None
    per_token = flops_per_token(row)
    if not per_token:
        return None
    # Some libraries multiply int8, others unpack to bf16.
    kind = "int8" if row.precision == "int8" else arithmetic_of(row)
    if kind not in sheet.flops:
        kind = max(sheet.flops, key=sheet.flops.__getitem__)
    flops = sheet.flops[kind]
    peak = f"the {kind} peak of {sheet.device}, {number(flops / 1e12)} TFLOP/s"
    return MOST * flops / per_token, peak


def least_step_s(row: Measurement) -> float | None:
    """Return the time to read all weights, a lower bound for decoding steps and first tokens."""
    sheet, weights = sheet_of(row), row.weight_bytes
    if sheet is None or not sheet.bandwidth_bytes_per_s or not weights or weights < CACHED_BYTES:
        return None
    return weights / sheet.bandwidth_bytes_per_s / MOST


def most_decoded_per_core_s(row: Measurement) -> float | None:
    """Return the most tokens/s a processor core can decode; None for a card's row."""
    if not (row.emulated or row.peak_device_memory_bytes is None) or not row.parameter_count:
        return None
    if not row.metrics.generated_tokens_per_s:
        return None
    return CORE_FLOPS.get(row.precision, CORE_FLOPS[""]) / (2.0 * row.parameter_count)


# ---------------------------------------------------------------- samples and prompts


def contradictions(
    rows: Sequence[Measurement], raw: pa.RecordBatch | None = None
) -> list[tuple[str, ...]]:
    """Return each row's contradictions; ``raw`` has samples and items of rows without them."""
    reasons = [list(_own_reasons(row)) for row in rows]
    if raw is None:
        samples = Records.of_rows(Sample, (row.samples for row in rows))
        items = Records.of_rows(Item, (row.items for row in rows))
    else:
        samples = Records.of_column(Sample, raw["samples"])
        items = Records.of_column(Item, raw["items"])
    if len(samples.row):
        with np.errstate(all="ignore"):
            for place, texts in _RawChecks(rows, samples, items).reasons.items():
                reasons[place] += texts.values()
    return list(map(tuple, reasons))


class _RawChecks:
    """Checks of samples and prompts; ``reasons`` has the first of each check, by row."""

    def __init__(self, rows: Sequence[Measurement], samples: Records, items: Records) -> None:
        self.rows, self.n = rows, len(rows)
        self.reasons: dict[int, dict[str, str]] = {}
        self.every = np.arange(self.n)
        self.timed = samples.where(samples["warmup"] == 0)
        if not len(self.timed.row):
            return
        self.items = items.where(np.isin(items.row, self.timed.row))
        self._repeats()
        self._limits()
        self._rates()
        self._compare("durations", "measure_s", self.whole_wall, "s", self.there)
        cpu_s = self._sum(self.timed.row, self.timed["cpu_s"])
        self._compare("durations", "cpu_s", cpu_s, "s", self.there)
        steps, lengths = self.counted.lists["step_s"]
        owner = np.repeat(self.counted.row, whole(lengths))
        first = self.counted["ttft_s"]
        self._percentiles(self.counted.row, first, {"ttft_s": 50}, "samples")
        times = {"tpot_p50_s": 50, "tpot_p95_s": 95, "tpot_p99_s": 99}
        self._percentiles(owner, steps, times, "steps")
        latencies = {"latency_p50_s": 50, "latency_p95_s": 95}
        self._percentiles(self.items.row, self.items["latency_s"], latencies, "prompts")
        self._losses(samples)
        self._counts()
        self.whole()
        self._texts()
        self._times()
        self._prompt_times()
        warm = samples.where((samples["warmup"] != 0) & (samples["rank"] == 0))
        spent = self._sum(warm.row, warm["wall_s"])
        stored = floats(row.warmup_s for row in rows)
        wrong = self.there & (spent > 0) & (spent > _most(stored))
        text = "warm-up took {:s}, its batches {:s}"
        self._blame("warm-up", wrong, self.every, text, stored, spent)
        self._against_the_card()

    def _blame(
        self, check: str, wrong: Numbers, owner: Numbers, text: str, *values: Numbers
    ) -> None:
        """Record the first wrong record of each row, once per check.

        ``wrong`` masks records and ``owner`` is their row. ``values`` are those of all records, for
        the ``{}`` in ``text``.
        """
        places = np.flatnonzero(wrong)
        for row, first in zip(*np.unique(owner[places], return_index=True), strict=True):
            own = (known[places[first]] for known in values)
            reason = text.format(*(v if isinstance(v, str) else _Number(v) for v in own))
            self.reasons.setdefault(int(row), {}).setdefault(check, reason)

    def _metric(self, name: str) -> Numbers:
        return floats(getattr(row.metrics, name) for row in self.rows)

    def _sum(self, owner: Numbers, values: Numbers | None = None) -> Numbers:
        return np.bincount(owner, values, self.n)

    def _repeats(self) -> None:
        """Find the complete repeats, their sums, and the samples that figures are computed from."""
        timed, n = self.timed, self.n
        ranked = Groups(timed.row, timed["repeat"], timed["rank"])
        repeat = Groups(timed.row[ranked.first], timed["repeat"][ranked.first])
        self.repeat_of = repeat.of[ranked.of]  # of each sample
        self.repeat_row = timed.row[ranked.first][repeat.first]
        rank_wall = np.bincount(ranked.of, timed["wall_s"])
        self.repeat_wall = largest(repeat.of, rank_wall, len(repeat.first))
        rank = Groups(timed.row, timed["rank"])
        rank_row = timed.row[rank.first]
        self.whole_wall = largest(rank_row, np.bincount(rank.of, timed["wall_s"]), n)
        complete = np.bincount(repeat.of) == self._sum(rank_row)[self.repeat_row]
        complete &= np.bincount(self.repeat_of, timed["complete"] == 0) == 0
        self.repeats = self._sum(self.repeat_row, complete)  # of each row
        self.there = self._sum(timed.row) > 0
        self.rated = complete | (self.repeats == 0)[self.repeat_row]
        self.counted = timed.where(self.rated[self.repeat_of])
        number = timed["repeat"][ranked.first][repeat.first]
        last = largest(self.repeat_row, np.where(self.rated, number, -np.inf), n)
        #: Samples of the repeat that the items belong to.
        self.last = timed.where((number == last[self.repeat_row])[self.repeat_of])
        self.trains = self._sum(self.counted.row, ~np.isnan(self.counted["loss"])) > 0

    def _limits(self) -> None:
        rows = self.rows
        peaks = [most_tokens_per_s(row) or (math.nan, "") for row in rows]
        self.cards = np.array([row.cards for row in rows])
        self.most = floats(most for most, _ in peaks)  # a card
        self.peak = np.array([peak for _, peak in peaks])
        # A window of time holds parts of requests, whose lengths say nothing of its tokens.
        asked = [{} if registry.in_windows(row.workload) else row.parameters for row in rows]
        self.exact = np.array([settings.get("ignore_eos") is True for settings in asked], bool)
        self.output_tokens = floats(_whole(settings.get("output_tokens")) for settings in asked)
        self.input_tokens = floats(_whole(settings.get("input_tokens")) for settings in asked)
        #: The whole batch is prefilled before its steps begin.
        static = [row.parameters.get("batching", "static") in ("static", "sorted") for row in rows]
        self.static = np.array(static, bool)

    def _rates(self) -> None:
        timed, walls, some = self.timed, self.repeat_wall, self.repeats > 0
        untimed = self._sum(self.repeat_row, self.rated & ~(walls > 0)) > 0
        testable = self.there & ~np.where(some, untimed, ~(self.whole_wall > 0))
        whole = np.where(some, self._sum(self.repeat_row, walls * self.rated), self.whole_wall)
        throughput = self._metric("throughput")
        unlike = testable & ~np.isnan(throughput)
        for name, amounts in (
            ("generated_tokens_per_s", timed["output_tokens"]),
            ("total_tokens_per_s", timed["input_tokens"] + timed["output_tokens"]),
            ("items_per_s", timed["items"]),
        ):
            done = np.bincount(self.repeat_of, amounts) * self.rated
            mean = self._sum(self.repeat_row, done / walls) / np.maximum(self.repeats, 1)
            # Training steps differ in work, so use the overall rate.
            total = self._sum(self.repeat_row, done) / whole
            rate = np.where(some & ~self.trains, mean, total)
            self._compare("rates", name, rate, "n", testable)
            unlike &= _differ(throughput, rate)
        text = "throughput is {:n}, its samples give none of that"
        self._blame("rates", unlike, self.every, text, throughput)
        stored = self._metric("repeats")
        wrong = self.there & (stored != self.repeats)
        text = "it counts {:,.0f} repeats, its samples have {:,.0f}"
        self._blame("repeats", wrong, self.every, text, stored, self.repeats)

    def _compare(self, check: str, name: str, recounted: Numbers, unit: str, rows: Numbers) -> None:
        """Blame masked rows whose stored figure differs from the recomputed one."""
        stored = self._metric(name)
        wrong = rows & _differ(stored, recounted)
        verb = "took" if unit == "s" else "give"
        text = f"{name} is {{:{unit}}}, its samples {verb} {{:{unit}}}"
        self._blame(check, wrong, self.every, text, stored, recounted)

    def _percentiles(
        self, owner: Numbers, numbers: Numbers, names: Mapping[str, int], of: str
    ) -> None:
        """Check percentiles; by any method one lies between two neighbouring values."""
        known = ~np.isnan(numbers)
        owner, numbers = owner[known], numbers[known]
        ordered = numbers[np.lexsort((numbers, owner))]
        count = self._sum(owner)
        start = np.concatenate(([0], np.cumsum(count)[:-1])).astype(np.int64)
        there = count > 0
        for name, percent_ in names.items():
            stored, recomputed = self._metric(name), np.full(self.n, np.nan)
            place = (percent_ / 100 * np.maximum(count - 1, 0))[there]
            low, high = np.full(self.n, np.nan), np.full(self.n, np.nan)
            low[there] = ordered[start[there] + np.floor(place).astype(np.int64)]
            high[there] = ordered[start[there] + np.ceil(place).astype(np.int64)]
            wrong = (stored < low * (1 - ROUNDING)) | (stored > high * (1 + ROUNDING))
            for row in np.flatnonzero(wrong):
                own = ordered[start[row] : start[row] + count[row]]
                recomputed[row] = percentile(own.tolist(), percent_)
            text = f"{name} is {{:s}}, its {of} give {{:s}}"
            self._blame(of, wrong, self.every, text, stored, recomputed)

    def _losses(self, samples: Records) -> None:
        known = samples.where(~np.isnan(samples["loss"]))
        if not len(known.row):
            return
        step = Groups(known.row, known["repeat"], known["batch"])
        mean = np.bincount(step.of, known["loss"]) / np.bincount(step.of)
        row = known.row[step.first]
        first = np.flatnonzero(np.concatenate(([True], row[1:] != row[:-1])))
        last = np.append(first[1:], len(row)) - 1
        for name, at in (("loss_first", first), ("loss_last", last)):
            recomputed = np.full(self.n, np.nan)
            recomputed[row[at]] = mean[at]
            trained = self.trains & ~np.isnan(recomputed)
            self._compare("losses", name, recomputed, "n", trained)

    def _counts(self) -> None:
        last, items = self.last, self.items
        some = self._sum(items.row) > 0
        for name, mine, theirs in (
            ("prompts", np.ones(len(items.row)), "items"),
            ("input tokens", items["input_tokens"], "input_tokens"),
            ("generated tokens", items["output_tokens"], "output_tokens"),
        ):
            recounted, stored = self._sum(items.row, mine), self._sum(last.row, last[theirs])
            wrong = some & (recounted != stored)
            text = f"its last repeat counts {{:,.0f}} {name}, its prompts have {{:,.0f}}"
            self._blame("prompts", wrong, self.every, text, stored, recounted)

    def whole(self) -> None:
        """Check token counts that the job's settings fix, in batches and in prompts."""
        timed, own = self.timed, self.timed.row
        count, written, read = timed["items"], timed["output_tokens"], timed["input_tokens"]
        most, length = self.output_tokens[own], self.input_tokens[own]
        text = "a batch generated {:,.0f} tokens for {:prompt} of {:,.0f} each"
        wrong = (written > 0) & self._misses(written, count * most, own)
        self._blame("lengths", wrong, own, text, written, count, most)
        text = "a batch read {:,.0f} tokens of {:prompt} with {:,.0f} each"
        wrong = (written > 0) & (read != count * length) & ~np.isnan(length)
        self._blame("lengths", wrong, own, text, read, count, length)
        own, written, read = self.items.row, self.items["output_tokens"], self.items["input_tokens"]
        most, length = self.output_tokens[own], self.input_tokens[own]
        wrong = self._misses(written, most, own)
        text = "a prompt generated {:,.0f} tokens where {:,.0f} were asked for"
        self._blame("lengths", wrong, own, text, written, most)
        wrong = (read != length) & ~np.isnan(length)
        text = "a prompt has {:,.0f} tokens where {:,.0f} were asked for"
        self._blame("lengths", wrong, own, text, read, length)

    def _misses(self, written: Numbers, limit: Numbers, owner: Numbers) -> Numbers:
        return (written > limit) | (self.exact[owner] & (written < limit))

    def _texts(self) -> None:
        """Check texts and token ids; tokens are counted up to the first end token."""
        items, own = self.items, self.items.row
        written, sizes = items["output_tokens"], items["output_text"]
        text = "a text of {:,.0f} bytes counts as {:token}"
        self._blame("texts", sizes > LONGEST_TOKEN * written, own, text, sizes, written)
        ids, lengths = items.lists["output_ids"]
        wrong = ~np.isnan(lengths) & (lengths != written)
        text = "a text counts as {:token}, and has {:,.0f} ids"
        self._blame("ids", wrong, own, text, written, lengths)
        counts = whole(lengths)
        place = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        text_of = np.repeat(np.arange(len(counts)), counts)
        words = [row.details.get(END_TOKEN_IDS, "").split() for row in self.rows]
        ends = [frozenset(map(int, filter(str.isdecimal, of_row))) for of_row in words]
        for end_ids in set(filter(None, ends)):  # none: unknown, or texts continue past them
            alike = np.array([known == end_ids for known in ends])[own[text_of]]
            ended = (place < counts[text_of] - 1) & np.isin(ids, list(end_ids)) & alike
            text = "a text counts as {:token}, and ended after {:,.0f}"
            self._blame("ids", ended, own[text_of], text, written[text_of], place + 1)
        # The device processes every real token but the last of each text, and padding.
        timed = self.timed
        real = timed["input_tokens"] + np.maximum(0, timed["output_tokens"] - timed["items"])
        positions = timed["computed_tokens"]
        wrong = (positions > 0) & (real > positions)
        text = "a batch has {:,.0f} tokens to work on, and the device worked on {:,.0f}"
        self._blame("positions", wrong, timed.row, text, real, positions)

    def _times(self) -> None:
        """Check that the parts of a batch's time do not exceed the whole."""
        timed, own, wall = self.timed, self.timed.row, self.timed["wall_s"]
        self._blame("walls", wall <= 0, own, "a batch took {:s}", wall)
        values, lengths = timed.lists["step_s"]
        batch = np.repeat(np.arange(len(own)), whole(lengths))
        steps, first = np.bincount(batch, values, len(own)), timed["ttft_s"]
        # Continuous batching reads prompts between steps, and ttft_s is a mean: the two overlap.
        known = np.nan_to_num(first)
        parts = np.where(self.static[own], known + steps, np.maximum(known, steps))
        text = "the steps of a batch took {:s} of its {:s}"
        self._blame("steps", parts > _most(wall), own, text, parts, wall)
        # A batch whose steps were all timed has nothing else to do that takes as long again.
        every = self.static[own] & (lengths > 0) & ~np.isnan(first)
        text = "a batch took {:s}, its first token and steps {:s}"
        self._blame("unexplained", every & (wall > 2 * parts + 1.0), own, text, wall, parts)
        inside = sum(np.nan_to_num(timed[name]) for name in PARTS)
        longest = np.maximum(inside, np.nan_to_num(timed["communication_s"]))
        text = "parts of a step took {:s} of its {:s}"
        self._blame("parts", longest > _most(wall), own, text, longest, wall)

    def _prompt_times(self) -> None:
        items, own = self.items, self.items.row
        latency, first, written = items["latency_s"], items["ttft_s"], items["output_tokens"]
        longest = largest(self.last.row, self.last["wall_s"], self.n)[own]
        text = "a prompt took {:s}, its batch {:s}"
        self._blame("prompt times", latency > _most(longest), own, text, latency, longest)
        text = "a prompt's first token took {:s} of {:s} for all"
        self._blame("prompt times", first > _most(latency), own, text, first, latency)
        # A prompt's tokens cannot come faster than the fastest step of its repeat. (In continuous
        # batching a late prompt does not wait for others to be read.)
        steps, lengths = self.last.lists["step_s"]
        fastest = -largest(np.repeat(self.last.row, whole(lengths)), -steps, self.n)
        known = np.isfinite(fastest) & (fastest > 0) & self.static
        least = np.where(known[own], first + fastest[own] * (written - 1), np.nan)
        text = "a prompt of {:.0f} tokens took {:s}; at the fastest step of all that takes {:s}"
        wrong = latency < least * (1 - SHARE) - SLACK_S
        self._blame("prompt steps", wrong, own, text, written, latency, least)

    def _against_the_card(self) -> None:
        timed, own, rows = self.timed, self.timed.row, self.rows
        wall, written = timed["wall_s"], timed["output_tokens"]
        rate = np.where(wall > 0, timed["computed_tokens"] / wall, 0.0)
        fastest = largest(own, rate / self.cards[own], self.n)
        share = MOST * fastest / self.most
        self._blame("peak", fastest > self.most, self.every, TOO_MANY, fastest, share, self.peak)
        per_core = floats(map(most_decoded_per_core_s, rows))[own]
        threads = np.array([row.threads or 1 for row in rows])
        cores = np.maximum(timed["cpu_s"], wall * threads[own])
        precisions = np.array([row.precision for row in rows])[own]
        text = "a core decoded {:n} tokens/s; {:n} take all that a core can do in {}"
        wrong = written > per_core * cores
        self._blame("cores", wrong, own, text, written / cores, per_core, precisions)
        # Each token of a text takes at least one step, even where steps were not timed.
        longest = np.where(self.exact, self.output_tokens, np.nan)[own]
        least = floats(map(least_step_s, rows))[own] * longest
        weights = floats(row.weight_bytes for row in rows)[own]
        wrong = (written > 0) & (wall < least)
        text = "{:.0f} tokens of a text took {:s}; reading {:B} of weights for each takes {:s}"
        self._blame("text bandwidth", wrong, own, text, longest, wall, weights, least)
        own, read, first = self.items.row, self.items["input_tokens"], self.items["ttft_s"]
        most = (self.most * self.cards)[own]
        text = "a prompt of {:.0f} tokens was read in {:s}; at {}, that takes {:s}"
        wrong = read > most * first
        self._blame("prefill", wrong, own, text, read, first, self.peak[own], read / most)


def _near(value: float, other: float, tolerance: float = ROUNDING) -> bool:
    """Return whether two numbers are equal but for rounding; NaN equals NaN."""
    return math.isclose(value, other, rel_tol=tolerance, abs_tol=1e-9) or (
        math.isnan(value) and math.isnan(other)
    )


def _differ(stored: Numbers, recomputed: Numbers) -> Numbers:
    """Return where a stored figure is known and differs by more than rounding."""
    room = np.maximum(ROUNDING * np.maximum(np.abs(stored), np.abs(recomputed)), 1e-9)
    return ~np.isnan(stored) & (stored != recomputed) & ~(np.abs(stored - recomputed) <= room)


def _most(whole: Numbers) -> Numbers:
    return whole * (1 + SHARE) + SLACK_S


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


class _Number(float):
    """A number that format specifications write with a unit: ``s`` seconds, ``n`` plain, ``%``,
    ``B`` bytes, or a noun."""

    def __format__(self, unit: str) -> str:
        if unit == "%":
            return percent(self, 3)
        if unit.isalpha() and len(unit) > 1:
            return plural(int(self), unit)
        write = {"s": seconds, "n": number, "B": size}.get(unit)
        return write(self) if write is not None else super().__format__(unit)
