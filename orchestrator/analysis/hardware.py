"""Compare rows with the limits of their card and with published figures.

``devices.csv`` holds makers' data sheets and ``published.csv`` others' figures, with sources. Each
decoding step reads all weights, so weight bytes over step time is a lower bound of memory traffic.
Compute share (MFU) is the tokens' operations (two per parameter and token; in training as the
workload counted) over the card's peak, and separately in prefill. A row matches a published figure
with the same task, model, precision, batch size per card, cards and named settings, on any device.
A user's own table is read too (``parse_published``), such as a dump of InferenceX.
"""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import TypeVar

from orchestrator.analysis.metrics import reported_figure
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.util.format import number, scalar, seconds, times
from workloads.bench import PREFILL_TOKENS_PER_S as PREFILL
from workloads.data.records import ENDINGS
from workloads.devices import all_devices
from workloads.util import files

_LOG = logging.getLogger("nightgrid.report")
_Line = TypeVar("_Line")
DIRECTORY = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published figure."""

    task: str
    model: str
    family: tuple[str, ...] = ()  # beginnings of the model's class
    parameters: int | None = None  # of the model, tied ones once
    dataset: str
    device: str
    cards: int
    batch_size: int  # per card; 0: the source does not say, and nothing is compared
    precision: str
    settings: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name, and values that match
    metric: str  # "throughput", or "latency", where less is better
    value: float
    unit: str  # samples/s, tokens/s, s/image, or one of ``SERVED_UNITS``
    also: tuple[str, ...] = ()  # other names of the model
    steps: int | None = None  # that were trained, and how long that took
    time: str = ""
    software: str = ""
    doubtful: bool = False  # nothing is compared with it; the note says why
    note: str
    source: str

    @property
    def title(self) -> str:
        """Device, precision and batch size or server, as far as the source gives them."""
        batch = f"batch {self.batch_size}" if self.batch_size else ""
        if self.task == "serving":
            batch = self.software
        return ", ".join(filter(None, (self.device, self.precision, batch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """A maker's figures for one card; None where the sheet has none."""

    device: str
    memory_gb: float | None
    bandwidth_bytes_per_s: float | None
    flops: Mapping[str, float]  # by arithmetic: "bf16", "fp8", …; dense, per second
    link_bytes_per_s: float | None  # of all links to other cards, both ways together
    tdp_w: float | None
    source: str

    @property
    def limits(self) -> str:
        """All known figures as text."""
        known = (
            (self.memory_gb, 1.0, "GB"),
            (self.bandwidth_bytes_per_s, 1e12, "TB/s"),
            *((rate, 1e12, f"TFLOP/s {kind}") for kind, rate in self.flops.items()),
            (self.link_bytes_per_s, 1e9, "GB/s to other cards"),
            (self.tdp_w, 1.0, "W"),
        )
        return ", ".join(f"{value / of:,.4g} {unit}" for value, of, unit in known if value)


@cache
def published_figures() -> tuple[Published, ...]:
    """Return the published figures of this package; none if they cannot be read."""
    return _read("published.csv", _published)


@cache
def data_sheets() -> Mapping[str, DeviceSheet]:
    """Return the data sheets of this package by device; none if they cannot be read."""
    return {sheet.device: sheet for sheet in _read("devices.csv", _device)}


def _read(name: str, make: Callable[[Mapping[str, str]], _Line]) -> tuple[_Line, ...]:
    path = DIRECTORY / name
    try:
        text = io.StringIO(files.read_text(path), newline="")
        return tuple(map(make, csv.DictReader(text, restval="")))
    except (OSError, ValueError, LookupError, csv.Error) as error:
        _LOG.warning("not read: %s: %r", path, error)
        return ()


_TEXTS = (
    *("task", "dataset", "device", "precision", "metric", "unit", "time", "software", "note"),
    "source",
)


def _published(line: Mapping[str, str]) -> Published:
    """Parse a line of ``published.csv``; settings: ``ignore_eos=true guidance=7.5|null``."""
    model, *also = line["model"].split("|")
    settings = (pair.partition("=") for pair in line["settings"].split())
    return Published(
        **{name: line[name] for name in _TEXTS},
        model=model,
        also=tuple(also),
        family=tuple(filter(None, line["family"].split("|"))),
        parameters=_count(line["parameters"]) if line["parameters"] else None,
        cards=_count(line["cards"]),
        batch_size=_count(line["batch_size_per_card"] or "0"),
        settings=tuple((name, tuple(values.split("|"))) for name, _, values in settings),
        value=_positive(line["value"]),
        steps=_count(line["steps"]) if line["steps"] else None,
        doubtful=line["doubtful"] == "yes",
    )


#: Units of served models -> the figure, by its name in rows and in tables of served models.
SERVED_UNITS = {
    "tokens/s per card": "tokens_per_s_per_card",
    "tokens/s per user": "tokens_per_s_per_user",
}
_LOAD = ("input_tokens", "output_tokens", "concurrency", "tensor_parallel", "data_parallel")


def parse_published(text: str, source: str) -> tuple[Published, ...]:
    """Parse a user's table: lines like ``published.csv``'s, or a line for each load of a served
    model (columns engine, model, system, precision, cards, those of ``_LOAD`` and the figures of
    ``SERVED_UNITS``). Raises ValueError, naming the line."""
    lines = csv.DictReader(io.StringIO(text, newline=""), restval="")
    figures: list[Published] = []
    try:
        served = "system" in (lines.fieldnames or ())
        for line in lines:
            figures += _served(line, source) if served else [_published(line)]
    except KeyError as error:
        raise ValueError(f"it has no column {error}") from None
    except (ValueError, csv.Error) as error:
        raise ValueError(f"line {lines.line_num}: {error}") from None
    return tuple(figures)


def _served(line: Mapping[str, str], source: str) -> Iterator[Published]:
    """Yield the figures of one load. Cards that a copy or a matrix is spread over default to 1."""
    unset = ("null",)  # as a setting's value
    single = {n: unset for n in ("tensor_parallel", "data_parallel") if line[n] == "1"}
    for unit, column in SERVED_UNITS.items():
        if line[column]:
            yield Published(
                task="serving",
                model=line["model"].rpartition("/")[2],
                dataset="",
                device=line["system"],
                cards=_count(line["cards"]),
                batch_size=1,
                precision=line["precision"],
                settings=tuple((n, (line[n], *single.get(n, ()))) for n in _LOAD),
                metric="throughput",
                value=_positive(line[column]),
                unit=unit,
                software=line["engine"],
                note="",
                source=source,
            )


def _device(line: Mapping[str, str]) -> DeviceSheet:
    """Parse a line of ``devices.csv`` into bytes and operations per second."""

    def figure(column: str, factor: float = 1.0) -> float | None:
        return _positive(line[column]) * factor if line[column].strip() else None

    units = {"bf16": "tflops", "fp8": "tflops", "int8": "tops", "tf32": "tflops", "fp32": "tflops"}
    peaks = {kind: figure(f"{kind}_{unit}_dense", 1e12) for kind, unit in units.items()}
    return DeviceSheet(
        device=line["device"],
        memory_gb=figure("memory_gb"),
        bandwidth_bytes_per_s=figure("bandwidth_tb_s", 1e12),
        flops={kind: rate for kind, rate in peaks.items() if rate is not None},
        link_bytes_per_s=figure("link_gb_s", 1e9),
        tdp_w=figure("tdp_w"),
        source=line["source"],
    )


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 2**40:
        raise ValueError(f"{text!r:.40} is not a count")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 1e-12 <= value <= 1e12:
        raise ValueError(f"{text!r:.40} is not a figure of a data sheet")
    return value


# ---------------------------------------------------------------- the roofline

#: Arithmetic used by each precision. int8 and int4 weights are unpacked to bf16 first.
ARITHMETIC = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "bf16",
    "int8": "bf16",
    "int4": "bf16",
    "fp8": "fp8",
}
#: Arithmetic of fp32 products at reduced precision, by PyTorch's setting.
_FEWER_BITS = {"high": "tf32", "medium": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One row against its card's data sheet; None where a figure is missing."""

    row: Measurement
    sheet: DeviceSheet
    bandwidth: float | None  # share of the peak, 0 to 1: a lower bound
    compute: float | None
    prefill: float | None  # of compute, while prompts are read (MFU)
    arithmetic: str  # "bf16", "fp8", …, or ""
    intensity: float | None  # operations per byte of weights, of one decoding step
    flops_per_s: float | None  # of one card


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Rows compared with a data sheet, and why others could not be."""

    shares: tuple[Share, ...] = ()
    emulated: int = 0  # succeeded rows on emulated cards
    unknown: tuple[str, ...] = ()  # real devices without a data sheet


def roofline_of(rows: Sequence[Measurement]) -> Roofline:
    """Compare each succeeded row on a real card with its data sheet."""
    shares, unknown, emulated = [], [], 0
    for row in rows:
        if row.state is not State.SUCCEEDED:
            continue
        if row.emulated:
            emulated += 1
            continue
        sheet = sheet_of(row)
        if sheet is None:
            unknown.append(row.device_name or "no device name")
            continue
        share = share_of(row, sheet)
        if share.bandwidth is not None or share.compute is not None:
            shares.append(share)
    return Roofline(shares=tuple(shares), emulated=emulated, unknown=tuple(dict.fromkeys(unknown)))


def sheet_of(row: Measurement) -> DeviceSheet | None:
    """Return the data sheet of the row's card; None for emulated cards."""
    if row.emulated or not row.device_name:
        return None
    return data_sheets().get(_product(row.device_name))


@lru_cache(maxsize=256)
def _product(device_name: str) -> str:
    return next(filter(None, (spec.product(device_name) for spec in all_devices())), "")


def share_of(row: Measurement, sheet: DeviceSheet) -> Share:
    """Compare a row with the peaks of its card."""
    metrics = row.metrics
    step_s = metrics.tpot_p50_s if metrics.tpot_p50_s and metrics.tpot_p50_s > 0 else None
    bandwidth = None
    if step_s and row.weight_bytes and sheet.bandwidth_bytes_per_s:
        bandwidth = row.weight_bytes / step_s / sheet.bandwidth_bytes_per_s
    arithmetic = arithmetic_of(row)
    peak = sheet.flops.get(arithmetic)
    per_token, operations, prefill, intensity = flops_per_token(row), None, None, None
    if per_token and metrics.total_tokens_per_s:  # of real tokens; padding is not counted
        operations = metrics.total_tokens_per_s * per_token / row.cards
    read_per_s = reported_figure(row, PREFILL.name, {PREFILL.name: PREFILL})
    if read_per_s and row.parameter_count:  # of the prompts' real tokens while they were read
        prefill = 2.0 * row.parameter_count * read_per_s
    if step_s and row.weight_bytes and row.parameter_count and row.batch_size:
        intensity = 2 * row.parameter_count * row.batch_size / row.weight_bytes
    return Share(
        row=row,
        sheet=sheet,
        bandwidth=bandwidth,
        compute=operations / peak if operations and peak else None,
        prefill=prefill / peak if prefill and peak else None,
        arithmetic=arithmetic if peak else "",
        intensity=intensity,
        flops_per_s=operations,
    )


def arithmetic_of(row: Measurement) -> str:
    """Return the arithmetic of a row's matrix products, as data sheets name it; "" if unknown."""
    autocast = row.parameters.get("autocast")
    precision = autocast if isinstance(autocast, str) and autocast in ARITHMETIC else row.precision
    kind = ARITHMETIC.get(precision, "")
    if kind == "fp32":
        return _FEWER_BITS.get(str(row.parameters.get("matmul_precision")), kind)
    return kind


def flops_per_token(row: Measurement) -> float | None:
    """Operations that a token needs: in training as the workload counted them."""
    if row.train_flops_per_token is not None:
        return row.train_flops_per_token
    if row.metrics.generated_tokens_per_s and row.parameter_count:
        return 2.0 * row.parameter_count
    return None


# ---------------------------------------------------------------- measured against published

#: Workloads of published tasks whose name differs.
_WORKLOADS = dict.fromkeys(("summarization-finetuning", "causal-lm-finetuning"), "finetuning")

REFERENCES = ("Gaudi1", "A100-80GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A figure, published or from this run (then ``row`` is set), with speed-ups by device."""

    figure: Published  # for rows of this run: the matched figure with its own device and value
    row: Measurement | None
    speedups: dict[str, float]
    #: Devices without a figure at the same batch size: best figures are compared.
    best_against_best: frozenset[str] = frozenset()

    def speedup(self, device: str) -> str:
        """Return the speed-up over a device as text."""
        text = times(self.speedups.get(device))
        return f"{text} best against best" if device in self.best_against_best else text

    @property
    def training(self) -> str:
        """Training steps and their time; for rows of this run, the projected time."""
        figure = self.figure
        if figure.steps is None or self.row is None:
            return f"{figure.steps:,} in {figure.time}" if figure.steps else ""
        samples = figure.steps * figure.batch_size * figure.cards
        return f"{figure.steps:,} would take {seconds(samples / figure.value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One task: published lines in their order, each followed by matching rows of this run."""

    about: Published  # its first figure; task, model, dataset, cards and unit are those of all
    lines: tuple[Line, ...]
    emulated: int  # rows that match except for emulation

    @property
    def load(self) -> str:
        """Lengths, users and cards of each server, of a served model; else empty."""
        settings = self.about.settings if self.about.task == "serving" else ()
        return ", ".join(
            f"{name.replace('_', ' ')} {values[0]}"
            for name, values in settings
            if "null" not in values
        )

    @property
    def title(self) -> str:
        """Task and model, and the load of a served one."""
        title = f"{self.about.task.replace('-', ' ')}: {self.about.model}"
        return ", ".join(filter(None, (title, self.load)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the sources on single figures."""
        figures = [line.figure for line in self.lines]
        return tuple(dict.fromkeys(f"{one.title}: {one.note}" for one in figures if one.note))

    @property
    def measured(self) -> bool:
        """Return whether any line is from this run."""
        return any(line.row is not None for line in self.lines)


def against_published(
    rows: Sequence[Measurement], published: Sequence[Published]
) -> tuple[Comparison, ...]:
    """Return one comparison for each published task, measured or not; loads of served models, of
    which tables have thousands, only if a row had that load."""
    groups: dict[tuple[object, ...], list[Published]] = {}
    for figure in published:
        load = (figure.unit, figure.settings) if figure.task == "serving" else ()
        key = (figure.task, figure.model, figure.dataset, figure.cards, *load)
        groups.setdefault(key, []).append(figure)
    by_size: dict[tuple[int | None, int], list[Measurement]] = {}
    for row in rows:
        if row.state is State.SUCCEEDED:
            by_size.setdefault((row.batch_size, row.cards), []).append(row)
    comparisons = (_comparison(group, by_size) for group in groups.values())
    return tuple(one for one in comparisons if one.measured or one.about.task != "serving")


def matches(row: Measurement, figure: Published) -> bool:
    """Return whether the row did the work of the figure, on any device."""
    return (
        row.workload == _WORKLOADS.get(figure.task, figure.task)
        and same_model(row, figure)
        and (not figure.dataset or _plain(_last_part(row.dataset)) == _plain(figure.dataset))
        and same_precision(row, figure.precision)
        and row.batch_size == figure.batch_size
        and row.cards == figure.cards
        and all(
            ("null" if (value := row.parameters.get(name)) is None else scalar(value)) in values
            for name, values in figure.settings
        )
    )


#: Rows below this share of the published figure for the same card are reported.
DOUBTED_SHARE = 0.5


def far_below(rows: Sequence[Measurement], published: Sequence[Published]) -> dict[str, str]:
    """Return a sentence for each row below half of the figure published for its card, by job id."""
    sentences = {}
    for row in rows:
        sheet = sheet_of(row) if row.state is State.SUCCEEDED else None
        device = sheet.device if sheet is not None else None
        for figure in (one for one in published if one.device == device):
            value = _value(row, figure) if matches(row, figure) else None
            if value is not None and speedup(figure.metric, value, figure.value) < DOUBTED_SHARE:
                sentences[row.job_id] = (
                    f"{figure.model} {figure.precision} b={figure.batch_size} on {figure.device} "
                    f"({row.engine}): {number(value)} {figure.unit}, published are "
                    f"{number(figure.value)}: {figure.source}"
                )
    return sentences


#: Parameters may differ by this share: heads and added tokens; bert-base-cased differs by 1.1 %.
_OTHER_SIZE = 0.008


def same_model(row: Measurement, figure: Published) -> bool:
    """Return whether a row's model is the published one.

    A hub's repository matches by its name, whatever its owner, commit and case, unless its family
    or size is known to differ; a directory or a saved model by family and size alone, or by its
    name where a table of served models gives neither.
    """
    repository, _, _ = row.model.partition("@")
    owner, _, name = repository.removeprefix("random:").rpartition("/")
    local = owner.startswith(("/", "~", ".")) or "/" in owner or ":" in repository
    alike = any(_plain(name) == _plain(one) for one in (figure.model, *figure.also))
    named = alike and not local
    if figure.task == "serving" and figure.parameters is None:
        return alike
    if row.parameter_count is None or figure.parameters is None:
        return named
    size = abs(row.parameter_count / figure.parameters - 1) <= _OTHER_SIZE
    kind = row.details.get("pipeline") or row.details.get("architecture")
    family = kind is None or kind.removeprefix("Gaudi").startswith(figure.family)
    return size and family and (named or local or (not owner and kind is not None))


def same_precision(row: Measurement, precision: str) -> bool:
    """Return whether the precisions match; ``bf16-mixed`` is fp32 weights under autocast."""
    autocast = str(row.parameters.get("autocast") or "none")
    base, _, mixed = precision.partition("-")
    if mixed == "mixed":
        return row.precision == precision or (row.precision == "fp32" and autocast == base)
    return row.precision == precision and autocast in ("none", precision)


def speedup(metric: str, value: float, reference: float) -> float:
    """Return how many times ``value`` is as fast as ``reference``; lower latency is faster."""
    return reference / value if metric == "latency" else value / reference


def _comparison(
    figures: Sequence[Published], rows: Mapping[tuple[int | None, int], Sequence[Measurement]]
) -> Comparison:
    lines = [_line(figure, None, figures) for figure in figures]
    emulated: set[str] = set()
    seen: set[str] = set()
    for figure in figures:
        for row in rows.get((figure.batch_size, figure.cards), ()):
            if row.job_id in seen or not matches(row, figure):
                continue
            if row.emulated:
                emulated.add(row.job_id)
            elif (value := _value(row, figure)) is not None:
                seen.add(row.job_id)
                ours = replace(
                    figure,
                    model=row.model,
                    also=(),
                    dataset=row.dataset,
                    device=row.device_name or str(row.accelerator),
                    cards=row.cards,
                    value=value,
                    time="",
                    software=row.engine if figure.task == "serving" else "",
                    doubtful=False,
                    note="",
                    source="this run",
                )
                lines.append(_line(ours, row, figures))
    return Comparison(about=figures[0], lines=tuple(lines), emulated=len(emulated))


def _line(figure: Published, row: Measurement | None, published: Sequence[Published]) -> Line:
    """Return a figure with its speed-ups, preferably at the same batch size, then precision."""
    speedups, unlike = {}, set()
    others = [one.device for one in published] if row is not None else []
    for device in dict.fromkeys((*REFERENCES, *others)):
        candidates = [f for f in published if f.device == device and not f.doubtful]
        if not candidates or figure.doubtful or figure.device == device:
            continue
        same_batch = [f for f in candidates if f.batch_size == figure.batch_size] or candidates
        alike = [f for f in same_batch if f.precision == figure.precision] or same_batch
        reference = max(alike, key=lambda one: speedup(one.metric, one.value, 1.0))
        speedups[device] = speedup(figure.metric, figure.value, reference.value)
        if reference.batch_size != figure.batch_size:
            unlike.add(device)
    return Line(figure=figure, row=row, speedups=speedups, best_against_best=frozenset(unlike))


def _value(row: Measurement, figure: Published) -> float | None:
    rate = row.metrics.items_per_s
    if figure.unit in SERVED_UNITS:
        return row.reported(SERVED_UNITS[figure.unit])
    if figure.unit == "tokens/s":
        return row.metrics.generated_tokens_per_s
    if rate is None or not math.isfinite(rate) or rate <= 0:
        return None
    if figure.unit == "samples/s":
        return rate
    return row.cards / rate if figure.unit == "s/image" else None


def _last_part(dataset: str) -> str:
    path = PurePosixPath(dataset)
    return path.stem if path.suffix in ENDINGS else path.name


@lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
