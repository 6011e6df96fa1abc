"""Experiments into jobs: the product, less what is excluded, plus what is included, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from orchestrator.domain.job import Accelerator, Job, Parameters, Scalar
from orchestrator.errors import Problem
from orchestrator.grid.axes import Axis, product, without
from orchestrator.grid.experiment import Experiment
from orchestrator.grid.fields import FIELD_NAMES, Vocabulary, shown
from orchestrator.grid.strict_yaml import Document
from orchestrator.planning.engine_choice import has_a_choice
from orchestrator.planning.needs import things
from workloads.errors import WorkloadError

_accelerator = cache(Accelerator)  # which thousands of jobs ask
_FIELDS = frozenset(FIELD_NAMES)
#: An engine decides which settings a job has, and a dataset what a revision means.
_FIXED = _FIELDS - {"engine", "dataset"}


class Expander:
    """Expands the experiments of one grid; keeps the problems that only expansion shows."""

    def __init__(self, document: Document, vocabulary: Vocabulary) -> None:
        self.document = document
        self.vocabulary = vocabulary
        self.problems: list[Problem] = []
        self.repeated: dict[tuple[str, str], int] = {}  # (experiment, first experiment) -> jobs
        self._parameters: dict[tuple[object, ...], Parameters] = {}
        self._revisions: dict[tuple[str, str], str] = {}  # of datasets: as written, and pinned

    def expand(self, experiments: Sequence[Experiment]) -> tuple[Job, ...]:
        """The jobs of all experiments in file order, each once."""
        by_id: dict[object, Job] = {}
        for experiment in experiments:
            count = 0
            for job in self._replicated(experiment):
                count += 1
                # Where a device has engines of its own, the plan may choose another than is named.
                apart = not experiment.engine_named and has_a_choice(job.accelerator.device)
                first = by_id.setdefault((job.job_id, "open") if apart else job.job_id, job)
                if first is not job:
                    pair = (experiment.name, first.experiment)
                    self.repeated[pair] = self.repeated.get(pair, 0) + 1
            if not count:
                hint = "everything is excluded; loosen `exclude`"
                self._complain(experiment, (), "an experiment without jobs", hint)
        return tuple(by_id.values())

    def notes(self) -> tuple[str, ...]:
        """Notes on jobs that were asked for more than once."""
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

    def _replicated(self, experiment: Experiment) -> Iterator[Job]:
        """Each job, then each again with the number of every further replicate."""
        if experiment.replicates == 1:
            yield from self._jobs(experiment)
            return
        jobs = list(self._jobs(experiment))
        if found := next(things(jobs, "produces"), None):
            _, setting, (kind, _) = found
            message = f"replicates: {experiment.replicates} with {setting}"
            hint = (
                f"each replicate would replace the {kind} of the one before; "
                "save it in an experiment of its own"
            )
            self._complain(experiment, (*experiment.path, "replicates"), message, hint)
        for number in range(1, experiment.replicates + 1):
            for job in jobs:
                yield replace(job, replicate=number)

    def _jobs(self, experiment: Experiment) -> Iterator[Job]:
        for axes, points in self._products(experiment):
            # Within a product, few settings of the workload vary, and none has other names.
            varying = [name for axis in axes for name in axis.names if name not in _FIXED]
            known: dict[tuple[object, ...], Parameters] = {}
            for settings in points:
                values = [settings[name] for name in varying]
                key = (*values, *map(type, values))
                parameters = known.get(key)
                if parameters is None:
                    parameters = self._workload_parameters(experiment, settings)
                    parameters = known[key] = self._pinned(experiment, settings, parameters)
                yield _job(experiment, settings, parameters)

    def _products(
        self, experiment: Experiment
    ) -> Iterator[tuple[Sequence[Axis], Iterator[dict[str, Scalar]]]]:
        """The products that an experiment consists of, each to be exhausted before the next."""
        patterns = [pattern for _, pattern in experiment.exclude]
        used = [False] * len(patterns)
        if not experiment.only_included:
            points = product(experiment.fixed, experiment.axes)
            yield experiment.axes, without(points, patterns, used) if patterns else points
        for (path, pattern), matched in zip(experiment.exclude, used, strict=True):
            if not matched:
                hint = self._why_unmatched(experiment, pattern.allowed)
                self._complain(experiment, path, "this pattern matches no job", hint)
        for axes in experiment.include:
            yield axes, product(experiment.fixed, axes)

    def _why_unmatched(self, experiment: Experiment, allowed: object) -> str:
        assert isinstance(allowed, dict)
        have: dict[str, list[Scalar]] = {name: [v] for name, v in experiment.fixed.items()}
        for axis in experiment.axes:
            for index, name in enumerate(axis.names):
                have[name] = list(dict.fromkeys(point[index] for point in axis.points))
        for name, values in allowed.items():
            if not values & set(have.get(name, [])):
                listed = ", ".join(map(str, have.get(name, [])[:20]))
                asked = ", ".join(sorted(map(str, values)))
                return f"{name} is never {asked} here; it is {listed}"
        return "its values never meet in one job"

    def _workload_parameters(
        self, experiment: Experiment, settings: dict[str, Scalar]
    ) -> Parameters:
        """All parameters, defaults filled in, sorted by name; checked once for each combination."""
        given = {name: value for name, value in settings.items() if name not in _FIELDS}
        engine = str(settings["engine"])
        key = (experiment.name, engine, *given, *given.values(), *map(type, given.values()))
        made = self._parameters.get(key)
        if made is None:
            validated, faults = self.vocabulary.check_together(experiment.workload, engine, given)
            for fault in faults:
                self._complain(experiment, (), fault.message, "")
            made = self._parameters[key] = tuple(sorted(validated.items()))
        return made

    def _pinned(
        self, experiment: Experiment, settings: dict[str, Scalar], parameters: Parameters
    ) -> Parameters:
        """The parameters with the commit of a dataset of the hub in the place of its revision."""
        revisions, dataset = self.vocabulary.revisions, settings["dataset"]
        given = dict(parameters)
        if revisions is None or "revision" not in given:
            return parameters
        pair = (str(dataset), str(given["revision"]))
        if pair not in self._revisions:
            try:
                self._revisions[pair] = revisions.dataset(*pair)
            except WorkloadError as error:
                self._revisions[pair] = pair[1]
                path = experiment.origins.get(("dataset", dataset), experiment.path)
                hint = "with a commit as `revision:` the hub is not asked"
                self._complain(experiment, path, f"dataset {error}", hint)
        if self._revisions[pair] == pair[1]:
            return parameters
        return tuple(sorted((given | {"revision": self._revisions[pair]}).items()))


def _job(experiment: Experiment, settings: dict[str, Scalar], parameters: Parameters) -> Job:
    return Job(
        experiment=experiment.name,
        workload=experiment.workload,
        model=settings["model"],  # type: ignore[arg-type]
        dataset=settings["dataset"],  # type: ignore[arg-type]
        accelerator=_accelerator(settings["accelerator"]),  # type: ignore[arg-type]
        cards=settings["cards"],  # type: ignore[arg-type]
        precision=settings["precision"],  # type: ignore[arg-type]
        batch_size=settings["batch_size"],  # type: ignore[arg-type]
        engine=settings["engine"],  # type: ignore[arg-type]
        isolation=settings["isolation"],  # type: ignore[arg-type]
        parameters=parameters,
        measure=experiment.measure,
    )
