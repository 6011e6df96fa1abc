"""The look at a grid's absolute paths on the nodes that will read them: one task a node asks the
rules of workloads, without torch or a card; over a dashboard, a job on the head starts these."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.job import Job
from orchestrator.core.topology import Node
from orchestrator.on_ray.channel import ask_nodes
from orchestrator.on_ray.cluster import connect
from orchestrator.on_ray.jobs import ANSWER_S, JobServer, is_job_address
from orchestrator.util import output
from orchestrator.util.format import plural
from workloads.base import JobDescription
from workloads.registry import find_workload
from workloads.rules import refusals

#: Most jobs of a grid that are looked at: those of one model, data and settings are one.
_MOST_JOBS = 500
_PATHS = ("model", "dataset")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRefusal:
    """An objection to a job by the files of some nodes."""

    job: Job
    setting: str
    reason: str  # names the nodes
    hint: str
    everywhere: bool  # on all nodes with such cards; else the job may run on another


def with_absolute_paths(jobs: Iterable[Job]) -> list[Job]:
    """Return one job of each model, data and settings with an absolute path."""
    chosen: dict[tuple[object, ...], Job] = {}
    for job in jobs:
        if any(getattr(job, name).startswith("/") for name in _PATHS):
            key = (job.accelerator, job.workload, job.engine, job.model, job.dataset)
            chosen.setdefault((*key, job.parameters), job)
    return list(chosen.values())[:_MOST_JOBS]


def refused(where: str | Sequence[Node], jobs: Sequence[Job]) -> list[NodeRefusal]:
    """Look at these jobs' files on the nodes of the cluster at a GCS or job server address, or on
    these nodes of the joined one.

    Raises ClusterError if it cannot be joined, SubmitError if the job server fails.
    """
    if not jobs:
        return []
    questions = list(map(_question, jobs))
    if not isinstance(where, str):
        return _refusals(jobs, _ask(where, questions))
    if is_job_address(where):
        return _refusals(jobs, JobServer(where).call(ask_here, questions))
    with connect(where) as cluster:
        return _refusals(jobs, _ask(cluster.nodes(), questions))


def ask_here(questions: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Ask the nodes of the cluster that this process is in."""
    with connect() as cluster:
        return _ask(cluster.nodes(), questions)


def _question(job: Job) -> dict[str, Any]:
    """A ``JobDescription`` as values, with the workload and the kind of card."""
    names = ("workload", *_PATHS, "precision", "batch_size", "cards", "engine")
    return {
        **{name: getattr(job, name) for name in names},
        "accelerator": str(job.accelerator),
        "device": job.accelerator.device,
        "parameters": dict(job.parameters),
    }


def _refusals(jobs: Sequence[Job], answers: Sequence[Sequence[Any]]) -> list[NodeRefusal]:
    """Join the objections of nodes (name, kind of card, entries), which differ by the node."""
    asked = Counter(kind for _, kind, _ in answers)
    nodes: dict[tuple[Any, ...], list[str]] = {}
    for name, _, entries in answers:
        for entry in entries:
            nodes.setdefault(tuple(entry), []).append(name)
    objections = []
    for (number, setting, reason, hint), names in nodes.items():
        job = jobs[number]
        where = names[0] if len(names) == 1 else plural(len(names), "node")
        objections.append(
            NodeRefusal(
                job=job,
                setting=setting,
                reason=f"on {where}: {reason}",
                hint=hint,
                everywhere=len(names) == asked[str(job.accelerator)],
            )
        )
    return objections


def _ask(nodes: Sequence[Node], questions: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return name, kind of card and objections of each node that answers in time."""
    from ray.exceptions import GetTimeoutError

    arguments = {node.node_id: (str(node.accelerator), questions) for node in nodes}
    by_node = ask_nodes(answers, arguments, ANSWER_S / 2)
    said = []
    for node in nodes:
        answer = by_node[node.node_id]
        if isinstance(answer, list):
            said.append([node.name, str(node.accelerator), answer])
        else:
            why = "it did not answer in time" if isinstance(answer, GetTimeoutError) else answer
            output.say_aside(f"note: {node.name} could not look at the grid's files: {why}"[:300])
    return said


def answers(accelerator: str, questions: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return number, setting, reason and hint of each objection by the files of this host."""
    found: list[list[Any]] = []
    for number, question in enumerate(questions):
        if question["accelerator"] != accelerator:
            continue
        names = [name for name in _PATHS if question[name].startswith("/")]
        missing = [name for name in names if not os.path.exists(question[name])]
        for name in missing:
            reason = f"there is no {question[name]}"
            found.append([number, name, reason, "copy it there, or mount the directory"])
        others = ("workload", "accelerator")
        job = JobDescription(**{k: v for k, v in question.items() if k not in others})
        for refusal in refusals(find_workload(question["workload"]), job) if not missing else ():
            if not refusal.unsupported:
                found.append([number, refusal.setting, refusal.reason, refusal.hint])
    return found
