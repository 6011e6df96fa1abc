"""Choice of an engine for jobs whose grid names none, by kind of card and packages of nodes. Pure.

A device's own engines (``EngineSpec.preferred``) are chosen where every node of the kind has them,
else the default engine. Jobs of an experiment with equal model and precision share the first engine
that can run all of them, so that only the grid's settings vary; else each job gets the first that
can run it. The choice is stored in the job and its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.job import Accelerator, Job, Parameters
from orchestrator.core.topology import Node
from orchestrator.grid.diagnostics import Rules
from orchestrator.grid.vocabulary import has_a_choice
from orchestrator.util.format import listed, plural
from workloads.engines import ENGINES, find_engine
from workloads.engines.base import EngineSpec
from workloads.models.precision import support
from workloads.packages import package_needs
from workloads.registry import WORKLOADS, find_workload
from workloads.rules import refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Packages of the nodes with one kind of card, and the devices of its jobs."""

    devices: tuple[str, ...]  # the kind's own, and the one that emulates it
    nodes: Mapping[str, Mapping[str, str]]  # packages by node name, where known
    emulated: bool = False
    on_host: bool = False  # emulated on the host's own device
    missing: str = ""  # why there are none, when no node has the kind

    def lacks(self, spec: EngineSpec, mode: str) -> dict[str, str]:
        """Missing requirements of an engine, by node."""
        lacks = {n: spec.lacks(self.devices[0], mode, v) for n, v in self.nodes.items()}
        return {name: lack for name, lack in lacks.items() if lack}


def software_of(nodes: Sequence[Node], kind: Accelerator) -> Software:
    """The software of a kind of card."""
    have = ", ".join(dict.fromkeys(node.accelerator.value for node in nodes))
    of_kind = [node for node in nodes if node.accelerator is kind]
    devices = dict.fromkeys([kind.device, *(node.device for node in of_kind)])
    return Software(
        devices=tuple(devices),
        nodes={node.name: dict(node.packages) for node in of_kind if node.packages is not None},
        emulated=any(node.emulated for node in of_kind),
        on_host=any(node.emulated and node.computes_on_host for node in of_kind),
        missing="" if of_kind else f"no node has {kind} cards; there is: {have or 'none'}",
    )


class PackageCheck:
    """Finds jobs whose packages no node with their kind of card has, of those nodes that said what
    they have."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._needs = Rules(package_needs, WORKLOADS)
        self._software: dict[Accelerator, Software] = {}
        self._engines: dict[tuple[object, ...], str] = {}

    def software(self, job: Job) -> Software:
        """The software of the nodes with cards of this job's kind."""
        if job.accelerator not in self._software:
            self._software[job.accelerator] = software_of(self._nodes, job.accelerator)
        return self._software[job.accelerator]

    def lacking(self, job: Job) -> str:
        """The package of a job's engine, precision or settings that is on no node, with the command
        that installs it; "" if none."""
        if reason := self._engine(job):
            return reason
        software = self.software(job)
        nodes, device = software.nodes, software.devices[-1]  # the one that computes
        for need in self._needs.answers(job, device) if nodes else ():
            if all(has.get(need.module) == "" for has in nodes.values()):
                return (
                    f"{need.reason} needs the package {need.module}, which is not installed on "
                    f"{listed(list(nodes))}: {need.install}"
                )
        return ""

    def needs_more(self, job: Job) -> bool:
        """Return whether a job needs a package beside those that every job needs."""
        spec, workload = ENGINES.get(job.engine), find_workload(job.workload)
        other = spec is not None and not spec.default and workload.ability is not None
        return other or bool(self._needs.answers(job, job.accelerator.device))

    def _engine(self, job: Job) -> str:
        spec = ENGINES.get(job.engine)
        if spec is None or find_workload(job.workload).ability is None:
            return ""
        mode = spec.mode(job.accelerator.device, dict(job.parameters))
        key = (job.accelerator, job.engine, mode)
        if key not in self._engines:
            software = self.software(job)
            lacks = software.lacks(spec, mode)
            reasons = "; ".join(dict.fromkeys(lacks.values()))
            everywhere = lacks and len(lacks) == len(software.nodes)
            reason = f"engine {job.engine} on {', '.join(lacks)}: {reasons}"
            self._engines[key] = reason if everywhere else ""
        return self._engines[key]


def with_engines(
    jobs: Sequence[Job], unnamed: Collection[str], nodes: Sequence[Node]
) -> tuple[tuple[Job, ...], tuple[str, ...]]:
    """Choose engines for jobs of ``unnamed`` experiments (which have the default engine); returns
    distinct jobs, and notes on the choices."""
    if not unnamed:
        return tuple(jobs), ()
    there = {node.accelerator for node in nodes}
    kinds = {job.accelerator: None for job in jobs if job.experiment in unnamed}
    kinds = {kind: None for kind in kinds if kind in there and has_a_choice(kind.device)}
    software = {kind: software_of(nodes, kind) for kind in kinds}
    chooser = _Chooser({kind: one for kind, one in software.items() if not one.on_host})
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, job in enumerate(jobs):
        if job.experiment in unnamed and job.accelerator in chooser.software:
            key = (job.experiment, job.workload, job.accelerator, job.model, job.precision)
            groups.setdefault(key, []).append(index)
    chosen = list(jobs)
    for indices in groups.values():
        for index, job in zip(indices, chooser.choose([jobs[i] for i in indices]), strict=True):
            chosen[index] = job
    by_id: dict[str, Job] = {}
    for job in chosen:
        by_id.setdefault(job.job_id, job)
    unique = tuple(by_id.values())
    changed = {now.accelerator for was, now in zip(jobs, chosen, strict=True) if now != was}
    return unique, tuple(chooser.notes(unique, unnamed, changed))


class _Chooser:
    def __init__(self, software: Mapping[Accelerator, Software]) -> None:
        self.software = software
        self._rules = Rules(refusals, WORKLOADS)
        self._parameters: dict[tuple[int, str, str, str], tuple[Parameters, Parameters]] = {}

    def choose(self, group: Sequence[Job]) -> list[Job]:
        """Each job of a group with its engine."""
        candidates = self._candidates(group[0])
        first: list[Job | None] = [None] * len(group)
        for spec in candidates:
            made = [self._runnable(job, spec) for job in group]
            whole = [job for job in made if job is not None]
            if len(whole) == len(group):
                return whole
            first = [known or job for known, job in zip(first, made, strict=True)]
        for place, job in enumerate(group):
            if first[place] is None:  # the first that could if installed: the plan says what lacks
                able = (self._runnable(job, spec, anywhere=True) for spec in candidates)
                first[place] = next((made for made in able if made is not None), job)
        return [job for job in first if job is not None]

    def _candidates(self, job: Job) -> list[EngineSpec]:
        """Engines to choose from, best first; empty if there is no choice."""
        software = self.software[job.accelerator]
        device, workload = software.devices[0], find_workload(job.workload)
        if workload.ability is None:
            return []
        able = [spec for spec in ENGINES.known() if workload.takes_engine(spec.name)]
        able = [spec for spec in able if all(map(spec.runs_on, software.devices))]
        preferred = [
            spec
            for spec in able
            if device in spec.preferred
            and all(
                spec.preferred_for(job.model, job.precision, has) for has in software.nodes.values()
            )
        ]
        preferred.sort(key=lambda spec: spec.preferred[device])
        if not software.nodes:  # the device's usual image is assumed, which has the first
            preferred = [spec for spec in preferred if spec.in_images][:1]
        usual = [spec for spec in able if spec.name == workload.default_engine]
        return [*preferred, *usual]

    def _runnable(self, job: Job, spec: EngineSpec, *, anywhere: bool = False) -> Job | None:
        """The job with an engine in the first mode that runs on all nodes of its kind
        (``anywhere``: on nodes with all packages), or None."""
        software = self.software[job.accelerator]
        if not all(support(job.precision, d, spec.name).supported for d in software.devices):
            return None
        for mode in self._modes(job, spec, software.devices[0]):
            parameters = self._with(job, spec, mode)
            made = replace(job, engine=spec.name, parameters=parameters)
            running = spec.mode(software.devices[0], dict(parameters))
            refused = any(self._rules.answers(made, device) for device in software.devices)
            if not refused and (anywhere or not software.lacks(spec, running)):
                return made
        return None

    def _modes(self, job: Job, spec: EngineSpec, device: str) -> Iterator[str]:
        """Values of the mode setting to try; "" leaves it unchanged."""
        modes = spec.modes.get(device)
        ability = find_workload(job.workload).ability or ""
        settings = spec.settings(ability)
        named = (
            settings is not None and modes is not None and modes.setting in settings.model_fields
        )
        if modes is None or not named or dict(job.parameters).get(modes.setting) is not None:
            yield ""
            return
        first = modes.chosen_for.get(ability, "")
        yield first
        yield from (name for name in ("", *modes.names) if name != first)

    def _with(self, job: Job, spec: EngineSpec, mode: str) -> Parameters:
        """The job's settings for another engine, without ineffective ones of the old engine; jobs
        that shared a tuple still do."""
        key = (id(job.parameters), job.workload, spec.name, mode)
        known = self._parameters.get(key)
        if known is None:
            workload = find_workload(job.workload)
            before, after = workload.declared(job.engine), workload.declared(spec.name)
            given = {
                name: value
                for name, value in job.parameters
                if name in after or name not in before or not before[name].is_default(value)
            }
            filled = {n: d.default for n, d in after.items() if n not in given}
            if mode:
                filled[spec.modes[job.accelerator.device].setting] = mode
            made = tuple(sorted((given | filled).items()))
            known = self._parameters[key] = (job.parameters, made)
        return known[1]

    def notes(
        self, jobs: Iterable[Job], unnamed: Collection[str], changed: Collection[Accelerator]
    ) -> Iterator[str]:
        """Sentences on what was chosen, for kinds of card where it changed a job."""
        open_jobs = [job for job in jobs if job.experiment in unnamed]
        for kind, software in self.software.items():
            counts: Counter[str] = Counter()
            for job in open_jobs:
                if job.accelerator is kind:
                    spec = find_engine(job.engine)
                    mode = spec.mode(kind.device, dict(job.parameters))
                    counts[job.engine + f" ({mode})" * (kind.device in spec.modes)] += 1
            choices = ", ".join(f"{words} for {plural(n, 'job')}" for words, n in counts.items())
            if choices and kind in changed:
                assumed = "" if software.nodes else "; assumed, since no node was asked what it has"
                yield f"where the grid names no engine: on {kind} {choices}{assumed}"


def differences(nodes: Sequence[Node]) -> Iterator[str]:
    """Sentences on nodes with one kind of card whose packages differ, each named."""
    kinds: dict[Accelerator, dict[str, dict[str, str]]] = {}
    for node in nodes:
        if node.packages is not None:
            kinds.setdefault(node.accelerator, {})[node.name] = dict(node.packages)
    for kind, by_node in kinds.items():
        for package in dict.fromkeys(name for packages in by_node.values() for name in packages):
            versions: dict[str, list[str]] = {}
            for node_name, packages in by_node.items():
                versions.setdefault(packages.get(package) or "none", []).append(node_name)
            if len(versions) > 1:
                parts = ", ".join(f"{v} on {' and '.join(names)}" for v, names in versions.items())
                yield f"{kind} nodes differ in {package}: {parts}"
