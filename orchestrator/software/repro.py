"""A folder that runs one job of a row again, in one process and without a cluster.

It holds a script in plain calls of the workload, the versions of the row's packages, the prompts,
and the interval in which 99 % of fresh processes with the same software on the same card land: by
the errors of both from their repeats and by how equals differ, as ``nightgrid compare`` judges.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from pprint import pformat
from textwrap import indent
from typing import Any

from orchestrator.analysis.rankings import doubt_of
from orchestrator.analysis.ratio import ASSUMED_NOISE, KNOWN, rate_of, ratio_of
from orchestrator.analysis.trends import trends_of
from orchestrator.core.errors import NotComparable, StoreError
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import TOOK
from orchestrator.store.reader import runs
from orchestrator.store.store import Store
from workloads import registry
from workloads.base import WorkloadError
from workloads.data.datasets import load_dataset
from workloads.data.shapes import json_line
from workloads.devices import environment_for
from workloads.engines import split_kind, variables_of

SCRIPT, PACKAGES, PROMPTS = "repro.py", "requirements.txt", "prompts.jsonl"
#: Share of fresh processes inside: one outside is to mean something when a night's rows are tried.
_EXPECTED = 0.99
#: Larger datasets stay where they are.
_MOST_CHARACTERS = 16 * 10**6
#: Pairs of runs of one job that all jobs' noise counts for, beside those of a job's kind.
_PRIOR_PAIRS = 4
#: Newest runs of a results directory that show how processes differ.
_MOST_RUNS = 20
#: What is in a row's versions and no package of an index.
_NO_PACKAGES = {"nightgrid", "python", "kernel", "host", "cpu"}

_TEXT = '''\
"""{label}: job {job_id} of the run {run}, once more in this process.

    pip install -r {packages}    # the versions of that row; the program itself was {program}
    python {script}

Measured {when} on {where}: {measured}.
Expected of 99 processes in 100: {low:.5g} to {high:.5g}, by the errors of both and {noise}.
{note}"""

import os

os.environ.update({environment})  # before torch is imported

import torch

from orchestrator.analysis.samples import metrics_of
from workloads import registry
from workloads.alone import Alone
from workloads.base import MeasureSettings, Request
from workloads.devices import device_for

torch.set_num_threads({threads})
request = Request(
{request}
)
samples = Alone(device_for({device!r})).run(request).samples
figures = metrics_of(
    [(0, sample) for sample in samples],
    confidence={confidence!r},
    throughput=registry.throughput_of({workload!r}),
)
value, low, high = figures.throughput, {low!r}, {high!r}
if value is None or not figures.repeats:
    raise SystemExit("no repeat was completed in time")
verdict = "inside" if low <= value <= high else "OUTSIDE"
own = figures.relative_half_width
spread = "" if own is None else f" ± {{own:.3%}}"
print(f"{{value:.5g}} {unit}{{spread}} in {{figures.repeats}} repeats:", end=" ")
print(f"{{verdict}} what was expected, {{low:.5g}} to {{high:.5g}}")
print(f"load of this host: {{os.getloadavg()[0]:.1f}} on {{os.cpu_count()}} processors")
'''


def folder_of(row: Measurement, history: Iterable[Measurement] = ()) -> dict[str, str]:
    """Return the folder's files, text by name; ``history`` shows how processes differ there.

    Raises NotComparable for a row without a figure, of several cards, or that took what another
    job saved.
    """
    rate = rate_of(row)
    if row.state is not State.SUCCEEDED or rate is None or row.batch_size is None:
        raise NotComparable(f"{row.job_id} ended as {row.state}: only a measured row has a figure")
    if row.cards > 1:
        raise NotComparable(
            f"{row.job_id} ran on {row.cards} cards: a script of one process cannot; run it again "
            "by `nightgrid run`"
        )
    if taken := row.details.get(TOOK):
        raise NotComparable(
            f"{row.job_id} took what another job saved ({taken}); run both by `nightgrid run`"
        )
    noise, degrees = noise_of(row, history)
    reach = ratio_of(rate, rate, confidence=_EXPECTED, noise=noise, noise_degrees=degrees)
    width = reach.high if reach.high is not None else math.exp(3 * noise)
    doubt = doubt_of(row)
    better = math.exp(doubt.better_by.get("throughput", 0.0))
    notes = ["The weights were random.\n"] if row.random_weights else []
    notes += ["Others took its processor: the figure is a lower bound.\n"] if better > 1 else []
    notes += [f"Its row does not rank: {doubt.flags}.\n"] if doubt.flags else []
    prompts = _prompts(row)
    # The variables of the row's worker; of an emulated card, those of the host's processors.
    kind, _ = split_kind(row.job.process_kind)
    index = row.card_indices[0] if row.card_indices else 0
    device = "cpu" if row.emulated else row.accelerator.device
    shown = environment_for(device, index, threads=row.threads, kind=kind)
    unit, at = row.metrics.throughput_unit, row.started_at
    day = None if at is None else datetime.fromtimestamp(at, tz=timezone.utc)
    # A build's own suffix is in no index.
    pins = sorted(
        f"{name}=={version.partition('+')[0]}\n"
        for name, version in row.versions.items()
        if name not in _NO_PACKAGES and version[:1].isdecimal()
    )
    source = "of the runs beside it" if degrees < KNOWN else "that is assumed"
    text = _TEXT.format(
        label=row.job.label,
        job_id=row.job_id,
        run=row.run,
        packages=PACKAGES,
        script=SCRIPT,
        program=f"commit {row.git_commit}" if row.git_commit else row.versions.get("nightgrid", ""),
        when="at an unknown time" if day is None else f"on {day:%Y-%m-%d}",
        where=f"{row.device_name}{' (an emulated card)' if row.emulated else ''}",
        measured=f"{rate.value:.5g} {unit}",
        noise=f"a noise of {noise:.1%} between processes {source}",
        note="".join(notes),
        environment=pformat({**variables_of(kind), **shown}, width=96),
        threads=row.threads or 1,
        request=_request(row, PROMPTS if prompts else row.dataset),
        device=device,
        confidence=row.measure.confidence,
        workload=row.workload,
        low=rate.value / width,
        high=rate.value * width * better,
        unit=unit,
    )
    files = {SCRIPT: text, PACKAGES: "".join(pins)}
    return files | ({PROMPTS: prompts} if prompts else {})


def noise_of(row: Measurement, history: Iterable[Measurement]) -> tuple[float, float]:
    """Standard deviation of the log ratio of two equals on the row's machine, beyond their repeats,
    and its degrees of freedom: as jobs of the row's kind differ from run to run in ``history``, and
    all jobs, which count as ``_PRIOR_PAIRS`` of the kind; assumed without such runs.

    Kinds differ in it: on a shared host what reads its memory drifts by a fifth within seconds,
    what stays in the caches does not."""
    trends = trends_of(other for other in history if _place(other) == _place(row))
    noise, degrees = math.sqrt(2) * trends.noise, trends.noise_degrees
    if degrees == KNOWN:
        noise = ASSUMED_NOISE
    kin = (trend.points for trend in trends.trends if _kind(trend.row) == _kind(row))
    pairs = [pair for points in kin for pair in pairwise(points)]
    if not pairs:
        return noise, degrees
    excess = sum(math.log(b.value / a.value) ** 2 - a.error**2 - b.error**2 for a, b in pairs)
    count = _PRIOR_PAIRS + len(pairs)
    return math.sqrt((_PRIOR_PAIRS * noise**2 + max(0.0, excess)) / count), count


def _place(row: Measurement) -> tuple[object, ...]:
    return row.device_name, row.emulated, row.nodes


def _kind(row: Measurement) -> tuple[object, ...]:
    return row.workload, row.engine, row.precision


def rows_of_runs(results: Path) -> list[Measurement]:
    """The rows of the newest runs of a results directory, without those that cannot be read."""
    rows: list[Measurement] = []
    for run in runs(results)[:_MOST_RUNS]:
        with contextlib.suppress(StoreError):
            rows += Store.existing(results, run).measurements(samples=False)
    return rows


def write_folder(
    row: Measurement, directory: Path, history: Iterable[Measurement] = ()
) -> list[str]:
    """Write the folder and return its files' names; raises as ``folder_of``, and StoreError."""
    files = folder_of(row, history)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {directory}: {error.strerror or error}") from error
    return list(files)


def _request(row: Measurement, dataset: str) -> str:
    """The keyword arguments of the row's ``Request``, one a line."""
    parameters, settings = registry.find_workload(row.workload).split(
        dict(row.parameters), row.engine
    )
    values: dict[str, Any] = {
        "workload": row.workload,
        "model": row.model,
        "dataset": dataset,
        "precision": row.precision,
        "batch_size": row.batch_size,
        "engine": row.engine,
        "residency_key": "alone",
        "parameters": dict(parameters),
        "settings": dict(settings),
    }
    arguments = [
        f"{name}={pformat(value, width=92, sort_dicts=False)}," for name, value in values.items()
    ]
    measure = pformat(asdict(row.measure), width=92, sort_dicts=False)
    return indent("\n".join([*arguments, f"measure=MeasureSettings(**{measure}),"]), "    ")


def _prompts(row: Measurement) -> str:
    """The dataset's examples as JSON lines; "" where two columns cannot hold them, or where it is
    large or none."""
    chosen = row.parameters.get("columns"), row.parameters.get("split") or "train"
    if not row.dataset or chosen[0] or chosen[1] != "train":
        return ""
    try:
        examples = load_dataset(row.dataset).examples
    except (WorkloadError, OSError):  # not on this machine: the script names it
        return ""
    if any(example.earlier or example.joined or not example.content for example in examples):
        return ""
    text = "".join(map(json_line, examples))
    return text if len(text) <= _MOST_CHARACTERS else ""
