"""Experiments into jobs: the product, less what is excluded, plus what is included, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.errors import Problem
from orchestrator.grid.axes import product, without
from orchestrator.grid.experiment import Experiment
from orchestrator.grid.fields import FIELD_NAMES, Vocabulary, shown
from orchestrator.grid.strict_yaml import Document
from orchestrator.job import Accelerator, Job, Scalar

_ACCELERATORS = {kind.value: kind for kind in Accelerator}
_FIELDS = frozenset(FIELD_NAMES)


class Expander:
    """Expands the experiments of one grid; keeps the problems that only expansion shows."""

    def __init__(self, document: Document, vocabulary: Vocabulary) -> None:
        self.document = document
        self.vocabulary = vocabulary
        self.problems: list[Problem] = []
        self.repeated: dict[tuple[str, str], int] = {}  # (experiment, first experiment) -> jobs
        self._parameters: dict[tuple[object, ...], tuple[tuple[str, Scalar], ...]] = {}

    def expand(self, experiments: Sequence[Experiment]) -> tuple[Job, ...]:
        """The jobs of all experiments in file order, each once."""
        by_id: dict[str, Job] = {}
        for experiment in experiments:
            count = 0
            for settings in self._points(experiment):
                count += 1
                job = self._job(experiment, settings)
                first = by_id.setdefault(job.job_id, job)
                if first is not job:
                    pair = (experiment.name, first.experiment)
                    self.repeated[pair] = self.repeated.get(pair, 0) + 1
            if not count:
                hint = "everything is excluded; loosen `exclude`"
                self._complain(experiment, (), "an experiment without jobs", hint)
        return tuple(by_id.values())

    def notes(self) -> tuple[str, ...]:
        """What was asked for more than once."""
        notes = []
        for (name, first), count in self.repeated.items():
            jobs = "1 job" if count == 1 else f"{count} jobs"
            where = "twice in it" if name == first else f"in {shown(first)} too"
            notes.append(f"{jobs} of experiment {shown(name)} stand {where}; planned once")
        return tuple(notes)

    def _complain(
        self, experiment: Experiment, where: tuple[str | int, ...], message: str, hint: str
    ) -> None:
        path = where or experiment.path
        self.problems.append(self.document.problem(path, message, hint))

    def _points(self, experiment: Experiment) -> Iterator[dict[str, Scalar]]:
        patterns = [pattern for _, pattern in experiment.exclude]
        used = [False] * len(patterns)
        if not experiment.only_included:
            yield from without(product(experiment.fixed, experiment.axes), patterns, used)
        for (path, pattern), matched in zip(experiment.exclude, used, strict=True):
            if not matched:
                hint = self._why_unmatched(experiment, pattern.allowed)
                self._complain(experiment, path, "this pattern matches no job", hint)
        for axes in experiment.include:
            yield from product(experiment.fixed, axes)

    def _why_unmatched(self, experiment: Experiment, allowed: object) -> str:
        assert isinstance(allowed, dict)
        have: dict[str, list[Scalar]] = {name: [v] for name, v in experiment.fixed.items()}
        for axis in experiment.axes:
            for index, name in enumerate(axis.names):
                have[name] = list(dict.fromkeys(row[index] for row in axis.rows))
        for name, values in allowed.items():
            if not values & set(have.get(name, [])):
                listed = ", ".join(map(str, have.get(name, [])[:20]))
                asked = ", ".join(sorted(map(str, values)))
                return f"{name} is never {asked} here; it is {listed}"
        return "its values never meet in one job"

    def _job(self, experiment: Experiment, settings: dict[str, Scalar]) -> Job:
        kind = _ACCELERATORS[str(settings["accelerator"])]
        return Job(
            experiment=experiment.name,
            workload=experiment.workload,
            model=settings["model"],  # type: ignore[arg-type]
            dataset=settings["dataset"],  # type: ignore[arg-type]
            accelerator=kind,
            cards=settings["cards"],  # type: ignore[arg-type]
            precision=settings["precision"],  # type: ignore[arg-type]
            batch_size=settings["batch_size"],  # type: ignore[arg-type]
            engine=settings["engine"],  # type: ignore[arg-type]
            isolation=settings["isolation"],  # type: ignore[arg-type]
            parameters=self._workload_parameters(experiment, settings),
            measure=experiment.measure,
        )

    def _workload_parameters(
        self, experiment: Experiment, settings: dict[str, Scalar]
    ) -> tuple[tuple[str, Scalar], ...]:
        """All parameters, defaults filled in, sorted by name; checked once for each combination."""
        given = {name: value for name, value in settings.items() if name not in _FIELDS}
        key = (experiment.name, *given, *given.values(), *map(type, given.values()))
        made = self._parameters.get(key)
        if made is None:
            validated, faults = self.vocabulary.check_together(experiment.workload, given)
            for fault in faults:
                self._complain(experiment, (), fault.message, "")
            made = self._parameters[key] = tuple(sorted(validated.items()))
        return made
