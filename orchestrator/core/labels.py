"""One label for a job everywhere: what varies in its grid, and nothing that does not.

``where`` and ``work`` tell pieces of work apart (model, workload, dataset, cards, settings whose
role is ``work``), ``choices`` the ways of doing one (precision, batch size, engine, settings whose
role is ``choice``). Under a heading that names the work, choices are enough: labels end with them.
A grid that varies many settings, mostly one at a time, names those that are not as usual.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from orchestrator.core.job import Job, Scalar
from orchestrator.core.settings import as_declared, declared_of

if TYPE_CHECKING:
    from orchestrator.core.measurement import Measurement

Labelled: TypeAlias = "Job | Measurement | Named"
#: With more settings of one role that vary, only those that are not as usual are named.
MOST_NAMED = 3
#: Digits of a job's id where no setting tells two jobs apart.
ID_DIGITS = 6
#: Of a model's commit, all of which its rows have.
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
        """The ways in which the work was done, which end the label."""
        return _joined(self.precision, self.batch, self.rest)

    @property
    def setting(self) -> str:
        """The words that tell jobs of one place, precision and batch size apart."""
        return _joined(self.work, self.rest)

    def __str__(self) -> str:
        return _joined(self.where, self.work, self.choices)


def labels_of(jobs: Sequence[Labelled]) -> dict[str, Label]:
    """The label of each of these jobs, by job id: no two have the same."""
    if not jobs:
        return {}
    names = _names(jobs)
    parameters = _Parameters(jobs)
    shared: dict[object, str] = {}  # few texts serve all jobs
    found: dict[str, Label] = {}
    known: set[Label] = set()
    twice: set[Label] = set()
    for job in jobs:
        of_work, of_choice = parameters.words(job)
        label = Label(
            where=_once(shared, *(word(job) for word in names.where)),
            work=of_work,
            precision=job.precision if names.precisions else "",
            batch=_once(shared, batch_word(job)) if names.batches else "",
            rest=_once(shared, *(word(job) for word in names.rest), of_choice),
        )
        if not any((label.where, label.work, label.precision, label.batch, label.rest)):
            label = replace(label, precision=job.precision, batch=batch_word(job))
        found[job.job_id] = label
        (twice if label in known else known).add(label)
    alike: dict[Label, list[Labelled]] = {}
    for job in jobs if twice else ():
        if found[job.job_id] in twice:
            alike.setdefault(found[job.job_id], []).append(job)
    for label, group in alike.items():
        found |= _told_apart(label, group, parameters)
    return found


def _once(shared: dict[object, str], *words: str) -> str:
    """The words as one text; the same object for the same words."""
    if words not in shared:
        shared[words] = _joined(*words)
    return shared[words]


def batch_word(job: Labelled) -> str:
    """``b=8``; ``b=48 (max)`` for a search that has found 48."""
    if isinstance(job, Job):
        return f"b={job.batch_size}"
    asked = job.batch_size_requested
    found = job.batch_size
    return f"b={asked}" if asked.isdecimal() or found is None else f"b={found} ({asked})"


def said(name: str, value: Scalar) -> str:
    """A setting and its value in words: ``batching continuous``, ``no padding``."""
    words = name.replace("_", " ")
    if isinstance(value, bool) or value is None:
        return words if value else f"no {words}"
    return f"{words} {value}"


def _told_apart(
    label: Label, group: Sequence[Labelled], parameters: _Parameters
) -> Iterator[tuple[str, Label]]:
    """Labels of jobs that differ in what changes nothing that is measured, or in nothing known."""
    neutral = parameters.neutral_words(group)
    known = {job.job_id: replace(label, rest=f"{label.rest} {neutral[job.job_id]}".strip())
             for job in group}  # fmt: skip
    twice = {one for one, count in Counter(known.values()).items() if count > 1}
    for job_id, one in known.items():
        digits = f"{one.rest} {job_id[:ID_DIGITS]}".strip()
        yield job_id, replace(one, rest=digits) if one in twice else one


def _joined(*words: str) -> str:
    return " ".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class _Names:
    """Words of a job's own settings that vary."""

    where: tuple[Callable[[Labelled], str], ...]
    rest: tuple[Callable[[Labelled], str], ...]
    precisions: bool
    batches: bool


def _names(jobs: Sequence[Labelled]) -> _Names:
    def varies(name: str) -> bool:
        return len({getattr(job, name) for job in jobs}) > 1

    def short(name: str) -> Callable[[Labelled], str]:
        every = {str(getattr(job, name)) for job in jobs}
        cut = {one: _last(one) for one in every}
        known = cut if len(set(cut.values())) == len(every) else {value: value for value in every}
        return lambda job: known[getattr(job, name)]

    where = [short(name) for name in ("model", "workload", "dataset") if varies(name)]
    if varies("cards"):
        where.append(lambda job: f"{job.cards} × {job.accelerator}")
    elif varies("accelerator"):
        where.append(lambda job: str(job.accelerator))
    rest: list[Callable[[Labelled], str]] = []
    if varies("engine"):
        rest.append(lambda job: job.engine)
    if varies("isolation"):
        rest.append(lambda job: f"isolation {job.isolation}")
    if varies("replicate"):
        rest.append(lambda job: f"replicate {job.replicate}" if job.replicate > 1 else "")
    batches = len({_asked(job) for job in jobs}) > 1
    return _Names(tuple(where), tuple(rest), varies("precision"), batches)


def _last(value: str) -> str:
    """The last part of a path, and a model of a hub with the first digits of its commit; any other
    name as it is."""
    name, at, commit = value.partition("@")
    if len(commit) == COMMIT_LENGTH:
        return name + at + commit[:COMMIT_DIGITS]
    path = value.startswith(("/", "./", "../", "~/"))
    return os.path.basename(os.path.normpath(value)) if path else value


def _asked(job: Labelled) -> str:
    return str(job.batch_size) if isinstance(job, Job) else job.batch_size_requested


class _Parameters:
    """The workloads' settings of some jobs, with their roles. Thousands of jobs share a few
    mappings of parameters, and each is looked at once."""

    def __init__(self, jobs: Sequence[Labelled]) -> None:
        self._kept: list[object] = []  # so that no other object gets the id of a key
        self._values: dict[tuple[str, str, int], Mapping[str, Scalar]] = {}
        self._words: dict[tuple[str, str, int], tuple[str, str]] = {}
        counts: Counter[tuple[str, str, int]] = Counter()
        for job in jobs:
            key = self._key(job)
            counts[key] += 1
            if key not in self._values:
                self._kept.append(job.parameters)
                self._values[key] = as_declared(job.workload, job.engine, dict(job.parameters))
        self._usual = self._varying(counts)

    def words(self, job: Labelled) -> tuple[str, str]:
        """Words of a job's work, and of its choices."""
        key = self._key(job)
        if key not in self._words:
            self._words[key] = self._of(key)
        return self._words[key]

    def neutral_words(self, group: Iterable[Labelled]) -> dict[str, str]:
        """All that varies, neutral settings included, of jobs that nothing else tells apart."""
        found = {}
        for job in group:
            values = self._values[self._key(job)]
            roles = declared_of(job.workload, job.engine)
            found[job.job_id] = _joined(
                *(
                    said(name, values[name])
                    for name in self._usual
                    if name in values and name in roles and roles[name].role == "neutral"
                )
            )
        return found

    @staticmethod
    def _key(job: Labelled) -> tuple[str, str, int]:
        return job.workload, job.engine, id(job.parameters)

    def _varying(self, counts: Counter[tuple[str, str, int]]) -> dict[str, Scalar]:
        """The settings that vary, by name: the value that is usual. A setting that only some jobs
        have, and these with one value, goes with whatever makes them have it."""
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
                usual[name] = (default or common)[0]
        return usual

    def _of(self, key: tuple[str, str, int]) -> tuple[str, str]:
        workload, engine, _ = key
        declared = declared_of(workload, engine)
        roles = {n: declared[n].role if n in declared else "work" for n in self._usual}
        named = [name for name in self._usual if roles[name] != "neutral"]
        counts = Counter(roles[name] for name in named)
        words: tuple[list[str], list[str]] = ([], [])
        values = self._values[key]
        for name in named:
            if name not in values:
                continue
            value, usual = values[name], self._usual[name]
            brief = counts[roles[name]] > MOST_NAMED
            if brief and type(value) is type(usual) and value == usual:
                continue
            words[roles[name] != "work"].append(said(name, value))
        return _joined(*words[0]), _joined(*words[1])
