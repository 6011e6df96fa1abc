"""An examination as text and as a JSON object."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.core import errors
from orchestrator.doctor.probe import Finding, Level
from orchestrator.on_ray.examination import ClusterFacts, NodeFacts
from orchestrator.util.format import plural
from workloads.engines import engine_packages

_GIB = 2**30
_MARKS = {Level.ERROR: "ERROR  ", Level.WARNING: "WARNING", Level.NOTE: "note   "}


def exit_code(findings: Sequence[Finding]) -> int:
    """Return the command's exit code, by the worst finding."""
    worst = max((finding.level for finding in findings), default=Level.NOTE)
    return {
        Level.NOTE: errors.OK,
        Level.WARNING: errors.CLUSTER_DOUBTFUL,
        Level.ERROR: errors.CLUSTER_UNFIT,
    }[worst]


def as_json(facts: ClusterFacts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Facts and findings as JSON values."""
    return {
        "emulated": facts.emulated,
        "address": facts.address,
        **findings_json(findings),
        "summary": summary_lines(facts),
        "facts": dataclasses.asdict(facts),
    }


def findings_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings as JSON values, with the worst level."""
    return {
        "worst": str(max((f.level for f in findings), default="ok")),
        "findings": [dataclasses.asdict(f) | {"level": str(f.level)} for f in findings],
    }


def finding_of(values: Mapping[str, str]) -> Finding:
    """Parse a finding from its JSON values."""
    return Finding(**{**values, "level": Level[values["level"].upper()]})  # type: ignore[arg-type]


def summary_lines(facts: ClusterFacts) -> list[str]:
    """Return a line for the cluster and one per node."""
    nodes = plural(len(facts.nodes), "node")
    lines = [f"{nodes} at {facts.address}, Ray {facts.driver.ray}"]
    if facts.emulated:
        lines.append("emulated cards on this machine: what concerns real cards is not checked")
    return lines + [f"  {node_line(node)}" for node in facts.nodes]


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return the findings with remedies, then the verdict."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.level]} {finding.where}: {finding.message}")
        lines.append(f"        {finding.remedy}")
    counts = Counter(finding.level for finding in findings)
    parts = [plural(counts[level], str(level)) for level in reversed(Level) if counts[level]]
    return [*lines, ", ".join(parts) or "all is well"]


def node_line(node: NodeFacts) -> str:
    """Return a line about a node."""
    kinds = " + ".join(f"{count} {kind}" for kind, count in node.cards.items()) or "no cards"
    parts = [f"{node.name}{' (head)' * (node.head and node.name != 'head')}", kinds]
    if node.device_name:
        parts.append(node.device_name)
    if node.cards:
        parts.append(f"{node.cards_free} free")
    probe = node.probe
    if probe is None:
        return ", ".join([*parts, node.trouble or ("dead" if not node.alive else "no answer")])
    if probe.driver_version:
        parts.append(f"driver {probe.driver_version}")
    parts += [
        f"{name} {probe.versions[name]}"
        for name in ("torch", *engine_packages(), "deepspeed")
        if name in probe.versions
    ]
    parts.append(f"Python {probe.python}")
    parts.append(f"{probe.memory_bytes / _GIB:.0f} GiB")
    if node.clock is not None:
        parts.append(f"clock {node.clock.offset_s * 1000:+.0f} ms ±{node.clock.bound_s * 1000:.0f}")
    return ", ".join(parts)
