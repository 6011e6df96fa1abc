"""Figures that others published: data sheets of accelerators, and a benchmark to compare with.

They lie in ``assets/published.csv`` and ``assets/devices.csv`` beside this module, each line with
its source, so that they travel wherever the package does. None of their figures stands in the code.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from workloads import files

_LOG = logging.getLogger("nightgrid.report")
_Line = TypeVar("_Line")
DIRECTORY = Path(__file__).resolve().parent / "assets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published figure. ``batch_size`` is per card; ``unit`` is samples/s, tokens/s or
    s/image; ``settings`` are those of our workload by which it was measured, beside the others: of
    each the values that mean the same."""

    task: str
    model: str
    dataset: str
    device: str
    cards: int
    batch_size: int  # 0: the source does not tell it, and nothing of ours is compared
    precision: str
    settings: tuple[tuple[str, tuple[str, ...]], ...] = ()
    metric: str  # "throughput", or "latency", where less is better
    value: float
    unit: str
    also: tuple[str, ...] = ()  # other names of the model
    steps: int | None = None  # that were trained, and how long that took
    time: str = ""
    software: str = ""
    doubtful: bool = False  # then nothing is compared with it; the note says why
    note: str
    source: str

    @property
    def title(self) -> str:
        """Device, precision and batch size, as far as the source tells them."""
        batch = f"batch {self.batch_size}" if self.batch_size else ""
        return ", ".join(filter(None, (self.device, self.precision, batch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """A maker's figures for one card; None where the sheet is silent."""

    device: str
    memory_gb: float | None
    bandwidth_bytes_per_s: float | None
    flops: Mapping[str, float]  # by arithmetic: "bf16", "fp8", …; dense, per second
    link_bytes_per_s: float | None  # of all links to other cards, both ways together
    tdp_w: float | None
    source: str

    @property
    def limits(self) -> str:
        """All of its figures that are known, in words."""
        known = (
            (self.memory_gb, 1.0, "GB"),
            (self.bandwidth_bytes_per_s, 1e12, "TB/s"),
            *((rate, 1e12, f"TFLOP/s {kind}") for kind, rate in self.flops.items()),
            (self.link_bytes_per_s, 1e9, "GB/s to other cards"),
            (self.tdp_w, 1.0, "W"),
        )
        return ", ".join(f"{value / of:,.4g} {unit}" for value, of, unit in known if value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Everything there is to compare with; both empty where the files are not found."""

    published: tuple[Published, ...] = ()
    devices: tuple[DeviceSheet, ...] = ()


@cache
def reference() -> Reference:
    """The published figures and data sheets that came with this program."""
    return Reference(
        published=_read("published.csv", read_published),
        devices=_read("devices.csv", read_devices),
    )


def _read(name: str, read: Callable[[Path], tuple[_Line, ...]]) -> tuple[_Line, ...]:
    """The lines of a file; none, and a warning, where it is not what it should be: a report has its
    own figures without it."""
    path = DIRECTORY / name
    try:
        return read(path)
    except (OSError, ValueError) as error:
        _LOG.warning("not read: %s: %s", path, error)
        return ()


def read_published(path: Path) -> tuple[Published, ...]:
    """The lines of ``published.csv``.

    Raises:
        OSError: it cannot be read.
        ValueError: a number is none, or a column is missing.
    """
    return tuple(
        Published(
            task=line["task"],
            model=line["model"].split("|")[0],
            also=tuple(line["model"].split("|")[1:]),
            dataset=line["dataset"],
            device=line["device"],
            cards=_whole(line["cards"]),
            batch_size=_whole(line["batch_size_per_card"]) if line["batch_size_per_card"] else 0,
            precision=line["precision"],
            settings=_settings(line["settings"]),
            metric=line["metric"],
            value=_positive(line["value"]),
            unit=line["unit"],
            steps=_whole(line["steps"]) if line.get("steps") else None,
            time=line.get("time") or "",
            software=line.get("software") or "",
            doubtful=line.get("doubtful") == "yes",
            note=line["note"],
            source=line["source"],
        )
        for line in _lines(path, _PUBLISHED_COLUMNS)
    )


def read_devices(path: Path) -> tuple[DeviceSheet, ...]:
    """The lines of ``devices.csv``, in bytes and operations per second.

    Raises:
        OSError: it cannot be read.
        ValueError: a number is none, or a column is missing.
    """
    return tuple(
        DeviceSheet(
            device=line["device"],
            memory_gb=_number(line["memory_gb"]),
            bandwidth_bytes_per_s=_times(line["bandwidth_tb_s"], 1e12),
            flops={
                kind: rate
                for kind, column in _PEAKS.items()
                if (rate := _times(line.get(column) or "", 1e12)) is not None
            },
            link_bytes_per_s=_times(line.get("link_gb_s") or "", 1e9),
            tdp_w=_number(line["tdp_w"]),
            source=line["source"],
        )
        for line in _lines(path, _DEVICE_COLUMNS)
    )


_PUBLISHED_COLUMNS = (
    *("task", "model", "dataset", "device", "cards", "batch_size_per_card", "precision"),
    *("settings", "metric", "value", "unit", "note", "source"),
)
#: The column of each arithmetic's peak; a sheet may lack any of them.
_PEAKS = {
    "bf16": "bf16_tflops_dense",
    "fp8": "fp8_tflops_dense",
    "int8": "int8_tops_dense",
    "tf32": "tf32_tflops_dense",
    "fp32": "fp32_tflops_dense",
}
_DEVICE_COLUMNS = (
    *("device", "memory_gb", "bandwidth_tb_s", "bf16_tflops_dense", "fp8_tflops_dense"),
    *("tdp_w", "source"),
)


def _lines(path: Path, columns: Iterable[str]) -> list[dict[str, str]]:
    text = files.read_text(path)
    try:
        lines = list(csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ValueError(f"not a table: {error}") from error
    for number, line in enumerate(lines, start=2):
        for column in columns:
            if not isinstance(line.get(column), str):
                raise ValueError(f"line {number} has no {column}")
    return lines


def _settings(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names and values, as in ``ignore_eos=true guidance=7.5|null``."""
    pairs = [pair.partition("=") for pair in text.split()]
    if any(not name or not value for name, _, value in pairs):
        raise ValueError(f"{text!r:.40} are not settings such as output_tokens=100")
    return tuple((name, tuple(value.split("|"))) for name, _, value in pairs)


def _whole(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 2**31:
        raise ValueError(f"{text!r:.40} is not a count")
    return value


def _number(text: str) -> float | None:
    return _positive(text) if text.strip() else None


def _positive(text: str) -> float:
    value = float(text)
    if not 1e-12 <= value <= 1e12:
        raise ValueError(f"{text!r:.40} is not a figure of a data sheet")
    return value


def _times(text: str, factor: float) -> float | None:
    value = _number(text)
    return None if value is None else value * factor
