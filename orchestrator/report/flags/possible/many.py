"""The raw checks of many rows at once, on columns: which rows need a closer look.

A run of a hundred thousand rows is read without its samples, since a record of each would take
minutes. Here they stay columns. A row that passes here passes every raw check; one that does not
(and each whose samples are of an unusual shape: several ranks, repeats that were cut) is given its
samples, and the checks themselves decide and say why. A test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.possible import card, counts, figures, times
from orchestrator.report.flags.possible.recount import ROUNDING
from orchestrator.results import arrays
from workloads.api import Item, Sample

if TYPE_CHECKING:
    import pyarrow as pa

#: The raw columns that are looked at.
COLUMNS = ("samples", "items")

#: Sums are made in another order here, so what is nearly at a limit is looked at, too.
_STRICTER = 0.99

#: Values that a record may lack: rows of a version that did not know the field have none.
_OPTIONAL = {each.name for kind in (Sample, Item) for each in fields(kind) if each.default is None}

Numbers = np.ndarray[Any, np.dtype[Any]]


def doubtful(rows: Sequence[Measurement], batch: pa.RecordBatch) -> list[bool]:
    """Tell of each row if it needs its raw samples to be judged.

    Args:
        rows: those of the batch, with samples and items or without.
        batch: their columns ``COLUMNS``, in the same order.
    """
    if not rows:
        return []
    with np.errstate(all="ignore"):
        try:
            return [bool(one) for one in _Look(rows, batch).bad]
        except KeyError:  # columns of an older version, which the reader of records fills up
            return [True] * len(rows)


class _Look:
    """One batch. ``bad`` collects the verdicts; a comparison with NaN is false, and passes."""

    def __init__(self, rows: Sequence[Measurement], batch: pa.RecordBatch) -> None:
        self.rows, self.n = rows, len(rows)
        self.bad = np.zeros(self.n, bool)
        self.sample = _Nested(batch["samples"])
        self.item = _Nested(batch["items"])
        self.metrics = [row.metrics for row in rows]
        timed = ~self.sample["warmup"]
        self.timed = _Part(self.sample, timed)
        self._shape()
        if len(self.timed.row):
            self._rates()
            self._samples()
            self._steps()
            self._losses()
        if len(self.item.row):
            self._prompts()

    def _mark(self, rows: Numbers) -> None:
        """Rows by number, each as often as it likes."""
        self.bad[rows] = True

    def _of(self, name: str) -> Numbers:
        """A metric of each row; NaN where it is not known."""
        return _floats(getattr(one, name) for one in self.metrics)

    def _off(self, said: Numbers, found: Numbers) -> Numbers:
        """Rows whose figure is not what was found."""
        most = _STRICTER * ROUNDING * np.maximum(np.abs(said), np.abs(found))
        return np.abs(said - found) > most + 1e-9

    def _shape(self) -> None:
        """Mark all but the usual shape: one rank, whole repeats, in order."""
        row, repeat = self.sample.row, self.sample["repeat"]
        self._mark(row[(self.sample["rank"] != 0) | ~self.sample["complete"]])
        batch = self.sample["batch"]
        later = repeat[1:] > repeat[:-1]
        later |= (repeat[1:] == repeat[:-1]) & (batch[1:] > batch[:-1])
        self._mark(row[1:][(row[1:] == row[:-1]) & ~later])
        self._mark(self.item.row[self.item["rank"] != 0])
        warm = self.sample["warmup"]
        spent = np.bincount(row[warm], self.sample["wall_s"][warm], self.n)
        allowed = _floats(one.warmup_s for one in self.rows)
        self.bad |= (spent > 0) & (spent > _most(allowed))

    def _rates(self) -> None:
        part, n = self.timed, self.n
        begins = np.flatnonzero(_changes(part.row) | _changes(part["repeat"]))
        self.run_row = part.row[begins]
        self.run_wall = np.add.reduceat(part["wall_s"], begins)
        self._mark(part.row[part["wall_s"] <= 0])
        runs = np.bincount(self.run_row, minlength=n)
        said = np.array([one.repeats for one in self.metrics])
        there = np.bincount(part.row, minlength=n) > 0
        self.bad |= there & (runs != said)
        self.trains = np.bincount(part.row, part.valid("loss"), n) > 0
        walls = np.bincount(self.run_row, self.run_wall, n)
        work = {
            "generated_tokens_per_s": part["output_tokens"],
            "total_tokens_per_s": part["input_tokens"] + part["output_tokens"],
            "items_per_s": part["items"],
        }
        unlike = ~np.isnan(self._of("throughput")) & there
        for name, done in work.items():
            done = np.add.reduceat(done, begins)
            mean = np.bincount(self.run_row, done / self.run_wall, n) / np.maximum(runs, 1)
            rate = np.where(self.trains, np.bincount(self.run_row, done, n) / walls, mean)
            self.bad |= there & self._off(self._of(name), rate)
            unlike &= self._off(self._of("throughput"), rate)
        self.bad |= unlike
        self.bad |= there & self._off(self._of("measure_s"), walls)
        spent = np.bincount(part.row, part["cpu_s"], n)
        self.bad |= there & self._off(self._of("cpu_s"), spent)
        # Samples and prompts of the last repeat.
        last = np.flatnonzero(np.append(self.run_row[1:] != self.run_row[:-1], True))
        self.last_run = np.full(n, -1)
        self.last_run[self.run_row[last]] = last
        self.run_of_sample = np.cumsum(_changes(part.row) | _changes(part["repeat"])) - 1
        self.begins = begins

    def _samples(self) -> None:
        part, rows = self.timed, self.rows
        own = part.row
        wall, read, written = part["wall_s"], part["input_tokens"], part["output_tokens"]
        items, positions = part["items"], part["computed_tokens"]
        real = read + np.maximum(0, written - items)
        self._mark(own[(positions > 0) & (real > positions)])
        asked, exact, length = self._lengths()
        limit = items * asked[own]
        over = (written > limit) | (exact[own] & (written != limit))
        self._mark(own[(written > 0) & over & ~np.isnan(limit)])
        wrong = (read != items * length[own]) & ~np.isnan(length[own])
        self._mark(own[(written > 0) & wrong])
        first = part["ttft_s"]
        self._percentiles(own, first, (("ttft_s", 50),))
        steps = self.step_sums = part.sums("step_s")
        self.apart = np.array([times.apart(row) for row in rows])
        known = np.where(np.isnan(first), 0.0, first)
        inside = np.where(self.apart[own], known + steps, np.maximum(known, steps))
        self._mark(own[inside > _most(wall)])
        told = self.apart[own] & (part.lengths("step_s") > 0) & ~np.isnan(first)
        self._mark(own[told & (wall > _STRICTER * (2 * (known + steps) + 1.0))])
        parts = sum(np.nan_to_num(part[name]) for name in times.PARTS)
        longest = np.maximum(parts, np.nan_to_num(part["communication_s"]))
        self._mark(own[longest > _most(wall)])
        limits = [card.most_tokens_per_s(row) for row in rows]
        self.most = _floats(
            one[0] * row.cards if one else None for one, row in zip(limits, rows, strict=True)
        )
        self._mark(own[positions > _STRICTER * self.most[own] * wall])
        decoded = _floats(card.most_decoded_per_core_s(row) for row in rows)
        threads = np.array([row.threads or 1 for row in rows])
        cores = np.maximum(part["cpu_s"], wall * threads[own])
        self._mark(own[written > _STRICTER * decoded[own] * cores])
        least = _floats(card.least_step_s(row) for row in rows)
        longest_text = _floats(card.longest_text(row) for row in rows)
        self._mark(own[(written > 0) & (wall * _STRICTER < (least * longest_text)[own])])

    def _lengths(self) -> tuple[Numbers, Numbers, Numbers]:
        """Tokens to generate, whether exactly so many, and tokens to read; NaN: not fixed."""
        found = [counts.asked_lengths(row) for row in self.rows]
        asked = _floats(one[0] for one in found)
        return asked, np.array([one[1] for one in found]), _floats(one[2] for one in found)

    def _steps(self) -> None:
        part = self.timed
        values, owner = part.flat("step_s")
        self._percentiles(part.row[owner], values, figures.STEP_PERCENTILES)
        self.fastest = np.full(self.n, np.nan)
        if len(values):
            last = self.run_of_sample[owner] == self.last_run[part.row[owner]]
            found = np.full(self.n, np.inf)
            np.minimum.at(found, part.row[owner][last], values[last])
            self.fastest = np.where(np.isfinite(found), found, np.nan)

    def _losses(self) -> None:
        valid = self.sample.valid("loss").astype(bool)
        row, loss = self.sample.row[valid], self.sample["loss"][valid]
        if not len(row):
            return
        self._mark(row[np.isnan(loss)])
        first = np.flatnonzero(_changes(row))
        last = np.append(first[1:], len(row)) - 1
        for name, at in (("loss_first", first), ("loss_last", last)):
            found = np.full(self.n, np.nan)
            found[row[at]] = loss[at]
            self.bad |= self.trains & self._off(self._of(name), found)
        # One loss a step; several batches of a repeat are looked at.
        batch = self.sample["batch"][valid]
        self._mark(row[batch > 0])

    def _prompts(self) -> None:
        item, n = self.item, self.n
        own = item.row
        there = np.bincount(own, minlength=n) > 0
        if not len(self.timed.row):
            return
        index = np.maximum(self.last_run, 0)
        for mine, theirs in (
            (np.ones(len(own)), "items"),
            (item["input_tokens"], "input_tokens"),
            (item["output_tokens"], "output_tokens"),
        ):
            counted = np.add.reduceat(self.timed[theirs], self.begins)[index]
            self.bad |= there & (np.bincount(own, mine, n) != counted)
        asked, exact, length = self._lengths()
        written, read = item["output_tokens"], item["input_tokens"]
        over = (written > asked[own]) | (exact[own] & (written != asked[own]))
        self._mark(own[over & ~np.isnan(asked[own])])
        self._mark(own[(read != length[own]) & ~np.isnan(length[own])])
        self._mark(own[item.sizes("output_text") > counts.LONGEST_TOKEN * written])
        if self.item.has("output_ids"):  # rows of an earlier version kept none
            self._ids(written)
        latency, first = item["latency_s"], item["ttft_s"]
        self._percentiles(own, latency, figures.LATENCY_PERCENTILES)
        longest = np.maximum.reduceat(self.timed["wall_s"], self.begins)[index]
        self._mark(own[latency > _most(longest)[own]])
        self._mark(own[first > _most(latency)])
        least = first + self.fastest[own] * (written - 1)
        soon = latency < (least * (1 - times.SHARE) - times.SLACK_S) / _STRICTER
        self._mark(own[self.apart[own] & soon])
        self._mark(own[read > _STRICTER * self.most[own] * first])

    def _ids(self, written: Numbers) -> None:
        """Mark rows whose kept texts have other ids than were counted."""
        item = self.item
        kept = item.valid("output_ids").astype(bool)
        if not kept.any():
            return
        ids, begins = item.offsets("output_ids")
        lengths = np.diff(begins)
        self._mark(item.row[kept & (lengths != written)])
        ends = [counts.ends_of(row) for row in self.rows]
        own = np.repeat(item.row, lengths)
        before_last = np.ones(len(ids), bool)
        before_last[begins[1:][lengths > 0] - 1] = False
        for known in {one for one in ends if one}:
            mine = np.array([one == known for one in ends])
            self._mark(own[mine[own] & before_last & np.isin(ids, list(known))])

    def _percentiles(self, own: Numbers, values: Numbers, names: figures.Percentiles) -> None:
        """A percentile lies between its two neighbours: so many values are below, so many not."""
        known = ~np.isnan(values)
        own, values = own[known], values[known]
        count = np.bincount(own, minlength=self.n)
        for name, percent in names:
            said = self._of(name)
            place = percent / 100 * (count - 1)
            room = ROUNDING * _STRICTER
            below = np.bincount(own, values < said[own] * (1 - room), self.n)
            upto = np.bincount(own, values <= said[own] * (1 + room), self.n)
            wrong = (upto < np.floor(place) + 1) | (below > np.ceil(place))
            self.bad |= (count > 0) & ~np.isnan(said) & wrong


class _Nested:
    """A column of lists of records: each field as one array, with the number of its row."""

    def __init__(self, column: Any) -> None:
        self._values = column.flatten()
        lengths = _lengths(column)
        self.row = np.repeat(np.arange(len(column)), lengths)

    def has(self, name: str) -> bool:
        """Return whether the records have such a field, which came with a later version."""
        return self._values.type.get_field_index(name) >= 0

    def array(self, name: str) -> Any:
        return self._values.field(name)

    def __getitem__(self, name: str) -> Numbers:
        if name in _OPTIONAL and not self.has(name):
            return np.full(len(self.row), np.nan)
        return arrays.as_numbers(self.array(name))

    def valid(self, name: str) -> Numbers:
        if name in _OPTIONAL and not self.has(name):
            return np.zeros(len(self.row), bool)
        return arrays.as_numbers(self.array(name).is_valid())

    def sizes(self, name: str) -> Numbers:
        """The bytes of texts; NaN where there is none."""
        import pyarrow.compute as pc

        return arrays.as_numbers(pc.binary_length(self.array(name)).cast("float64"))

    def offsets(self, name: str) -> tuple[Numbers, Numbers]:
        """All values of a field of lists, and where each list begins."""
        lists = self.array(name)
        begins = np.concatenate(([0], np.cumsum(_lengths(lists)))).astype(np.int64)
        return arrays.as_numbers(lists.flatten()), begins


class _Part:
    """Some of the records of a column."""

    def __init__(self, whole: _Nested, chosen: Numbers) -> None:
        self._whole, self._chosen = whole, chosen
        self.row = whole.row[chosen]
        self._kept: dict[str, Numbers] = {}

    def __getitem__(self, name: str) -> Numbers:
        if name not in self._kept:
            self._kept[name] = self._whole[name][self._chosen]
        return self._kept[name]

    def valid(self, name: str) -> Numbers:
        return self._whole.valid(name)[self._chosen]

    def lengths(self, name: str) -> Numbers:
        _, begins = self._whole.offsets(name)
        return np.diff(begins)[self._chosen]

    def sums(self, name: str) -> Numbers:
        values, begins = self._whole.offsets(name)
        upto = np.concatenate(([0.0], np.cumsum(values)))
        return (upto[begins[1:]] - upto[begins[:-1]])[self._chosen]

    def flat(self, name: str) -> tuple[Numbers, Numbers]:
        """The values of a field of lists, each with the number of its record."""
        values, begins = self._whole.offsets(name)
        owner = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
        kept = self._chosen[owner]
        number = np.cumsum(self._chosen) - 1
        return values[kept], number[owner[kept]]


def _lengths(lists: Any) -> Numbers:
    """The length of each list; 0 where there is none."""
    return np.nan_to_num(arrays.as_numbers(lists.value_lengths())).astype(np.int64)


def _changes(values: Numbers) -> Numbers:
    """True where a value is not that before it, and at the beginning."""
    return np.concatenate(([True], values[1:] != values[:-1]))


def _most(whole: Numbers) -> Numbers:
    return _STRICTER * (whole * (1 + times.SHARE) + times.SLACK_S)


def _floats(values: Any) -> Numbers:
    return np.array([np.nan if value is None else value for value in values], float)
