"""Job labels: only what varies in the grid.

``where`` and ``work`` name the work (settings whose role is ``work``), ``choices`` the way of doing
it. Labels end with the choices, which suffice under a heading that names the work.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from orchestrator.core.job import Job, Scalar
from orchestrator.core.settings import as_declared, batch_text, declared_of

if TYPE_CHECKING:
    from orchestrator.core.measurement import Measurement

Labelled: TypeAlias = "Job | Measurement | Named"
#: If more settings of one role vary, only those with unusual values are named, and these.
MOST_NAMED = 3
ALWAYS_NAMED = frozenset({"method", "rank"})
#: A setting that says how a dataset is read: its name tells it, unless it is read in two ways.
TOLD_BY_DATASET = "columns"
#: Digits of the id that distinguish jobs with equal settings.
ID_DIGITS = 6
#: Length of a model's commit in rows, and the digits that labels show.
COMMIT_LENGTH, COMMIT_DIGITS = 40, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The columns of a row that make its label."""

    job_id: str
    workload: str
    model: str
    dataset: str
    accelerator: str
    cards: int
    precision: str
    batch_size: int | None
    batch_size_requested: str
    engine: str
    isolation: str
    replicate: int
    parameters: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The label of one job among others."""

    where: str  # model, workload, dataset and cards; each word "" where all have the same
    work: str  # settings whose role is ``work``
    precision: str
    batch: str
    rest: str  # the other choices

    @property
    def choices(self) -> str:
        """End of the label: how the work was done."""
        return _joined(self.precision, self.batch, self.rest)

    @property
    def setting(self) -> str:
        """Words that distinguish jobs of one place, precision and batch size."""
        return _joined(self.work, self.rest)

    def __str__(self) -> str:
        return _joined(self.where, self.work, self.choices)


def labels_of(jobs: Sequence[Labelled]) -> dict[str, Label]:
    """Distinct labels of these jobs, by job id."""
    words: dict[str, Callable[[Labelled], str]] = {
        "engine": lambda job: job.engine,
        "isolation": lambda job: f"isolation {job.isolation}",
        "replicate": lambda job: f"replicate {job.replicate}" if job.replicate > 1 else "",
    }
    rest = [word for name, word in words.items() if _varies(jobs, name)]
    where = _where_words(jobs)
    precisions = _varies(jobs, "precision")
    batches = len({_requested(job) for job in jobs}) > 1
    parameters = _Parameters(jobs)
    labels: dict[str, Label] = {}
    for job in jobs:
        of_work, of_choice = parameters.words(job)
        label = Label(
            where=_joined(*(word(job) for word in where)),
            work=of_work,
            precision=job.precision if precisions else "",
            batch=batch_word(job) if batches else "",
            rest=_joined(*(word(job) for word in rest), of_choice),
        )
        if not str(label):
            label = replace(label, precision=job.precision, batch=batch_word(job))
        labels[job.job_id] = label
    counts = Counter(labels.values())
    alike: dict[Label, list[Labelled]] = {}
    for job in jobs if len(counts) < len(labels) else ():
        if counts[labels[job.job_id]] > 1:
            alike.setdefault(labels[job.job_id], []).append(job)
    for label, group in alike.items():
        labels |= _distinct(label, group, parameters)
    return labels


def batch_word(job: Labelled) -> str:
    """``b=8``; ``b=48 (max)`` for the result of a search; "" for a server's own batches."""
    requested = _requested(job)
    if isinstance(job, Job) or requested.isdecimal() or job.batch_size is None:
        return batch_text(job.workload, requested)
    return f"b={job.batch_size} ({requested})"


def said(name: str, value: Scalar) -> str:
    """A setting and its value in words: ``batching continuous``, ``no padding``; "" if empty."""
    words = name.replace("_", " ")
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{words} {value}"


def _distinct(
    label: Label, group: Sequence[Labelled], parameters: _Parameters
) -> Iterator[tuple[str, Label]]:
    """Labels of jobs that differ only in neutral settings, or in nothing known."""
    labels = {
        job.job_id: replace(label, rest=_joined(label.rest, parameters.neutral_words(job)))
        for job in group
    }
    counts = Counter(labels.values())
    for job_id, one in labels.items():
        digits = job_id[:ID_DIGITS] if counts[one] > 1 else ""
        yield job_id, replace(one, rest=_joined(one.rest, digits))


def _joined(*words: str) -> str:
    return " ".join(filter(None, words))


def _varies(jobs: Sequence[Labelled], name: str) -> bool:
    return len({getattr(job, name) for job in jobs}) > 1


def _where_words(jobs: Sequence[Labelled]) -> list[Callable[[Labelled], str]]:
    def short(name: str) -> Callable[[Labelled], str]:
        full = {str(getattr(job, name)) for job in jobs}
        cut = {value: _last(value) for value in full}
        unambiguous = len(set(cut.values())) == len(full)
        return lambda job: cut[getattr(job, name)] if unambiguous else getattr(job, name)

    where = [short(name) for name in ("model", "workload", "dataset") if _varies(jobs, name)]
    if _varies(jobs, "cards"):
        where.append(lambda job: f"{job.cards} × {job.accelerator}")
    elif _varies(jobs, "accelerator"):
        where.append(lambda job: str(job.accelerator))
    return where


def _last(value: str) -> str:
    """Shorten a path to its last part, and the commit of a hub's model to its first digits."""
    name, at, commit = value.partition("@")
    if len(commit) == COMMIT_LENGTH:
        return name + at + commit[:COMMIT_DIGITS]
    path = value.startswith(("/", "./", "../", "~/"))
    return os.path.basename(os.path.normpath(value)) if path else value


def _requested(job: Labelled) -> str:
    return str(job.batch_size) if isinstance(job, Job) else job.batch_size_requested


class _Parameters:
    """Workload settings of some jobs by role, memoised: thousands of jobs share a few mappings."""

    def __init__(self, jobs: Sequence[Labelled]) -> None:
        self._mappings: list[object] = []  # so that no other object gets the id of a key
        self._values: dict[tuple[str, str, int], Mapping[str, Scalar]] = {}
        self._words: dict[tuple[str, str, int], tuple[str, str]] = {}
        counts: Counter[tuple[str, str, int]] = Counter()
        readings: dict[str, set[Scalar]] = {}  # of each dataset
        for job in jobs:
            key = self._key(job)
            counts[key] += 1
            if key not in self._values:
                self._mappings.append(job.parameters)
                self._values[key] = as_declared(job.workload, job.engine, dict(job.parameters))
            reading = self._values[key].get(TOLD_BY_DATASET)
            readings.setdefault(job.dataset, set()).add(reading)
        self._usual = self._varying(counts)
        if all(len(known) == 1 for known in readings.values()):
            self._usual.pop(TOLD_BY_DATASET, None)

    def words(self, job: Labelled) -> tuple[str, str]:
        """Words of a job's work, and of its choices."""
        key = self._key(job)
        if key not in self._words:
            self._words[key] = self._of(key)
        return self._words[key]

    def neutral_words(self, job: Labelled) -> str:
        """Neutral settings that vary, for a job that nothing else distinguishes."""
        values, roles = self._values[self._key(job)], declared_of(job.workload, job.engine)
        neutral = [name for name in self._usual if name in roles and roles[name].role == "neutral"]
        return _joined(*(said(name, values[name]) for name in neutral if name in values))

    @staticmethod
    def _key(job: Labelled) -> tuple[str, str, int]:
        return job.workload, job.engine, id(job.parameters)

    def _varying(self, counts: Counter[tuple[str, str, int]]) -> dict[str, Scalar]:
        """Usual values of the settings that vary, by name. A setting that only some jobs have, with
        one value, is left out: whatever makes them have it is named already."""
        seen: dict[str, Counter[tuple[type, Scalar]]] = {}
        for key, values in self._values.items():
            for name, value in values.items():
                seen.setdefault(name, Counter())[type(value), value] += counts[key]
        defaults = {
            name: declaration
            for workload, engine, _ in self._values
            for name, declaration in declared_of(workload, engine).items()
        }
        usual = {}
        for name, known in seen.items():
            if len(known) > 1:
                most = max(known.values())
                common = [value for (_, value), count in known.items() if count == most]
                declared = defaults.get(name)
                default = [v for v in common if declared is not None and declared.is_default(v)]
                usual[name] = min(default or common, key=str)
        return usual

    def _of(self, key: tuple[str, str, int]) -> tuple[str, str]:
        workload, engine, _ = key
        declared, values = declared_of(workload, engine), self._values[key]
        roles = {n: declared[n].role if n in declared else "work" for n in self._usual}
        counts = Counter(roles.values())
        words: dict[str, list[str]] = {"work": [], "choice": []}
        for name, usual in self._usual.items():
            role = roles[name]
            if role == "neutral" or name not in values:
                continue
            value = values[name]
            as_usual = type(value) is type(usual) and value == usual
            if counts[role] <= MOST_NAMED or not as_usual or name in ALWAYS_NAMED:
                words["work" if role == "work" else "choice"].append(said(name, value))
        return _joined(*words["work"]), _joined(*words["choice"])
