"""Judging what an examination found: one function a check, each from facts to findings. Pure.

A finding says what is wrong where, and what to do. ERROR is for what would make a run fail, wholly
or on that node; WARNING for what would make it slow, or its figures doubtful; NOTE for the rest.
"""

from __future__ import annotations

from orchestrator.doctor import cluster_checks, node_checks
from orchestrator.doctor.facts import ClusterFacts, Finding, Level, NodeFacts, Probe, Versions


def judge(facts: ClusterFacts) -> list[Finding]:
    """All findings, the worst first, then by node."""
    found = [
        *cluster_checks.check_nodes(facts),
        *cluster_checks.check_token(facts),
        *cluster_checks.check_dashboard(facts),
        *cluster_checks.check_shared(facts),
        *cluster_checks.check_versions(facts),
    ]
    for node in facts.nodes:
        if node.probe is not None:
            found += check_node(node, node.probe)
    return sorted(found, key=lambda finding: (-finding.level, finding.where, finding.check))


def check_node(node: NodeFacts, probe: Probe) -> list[Finding]:
    """All that concerns one node alone."""
    return [
        *node_checks.check_imports(node, probe),
        *node_checks.check_quantization(node, probe),
        *node_checks.check_cards(node, probe),
        *node_checks.check_accounts(node),
        *node_checks.check_server(node, probe),
        *node_checks.check_clock(node),
        *node_checks.check_limits(node, probe),
        *node_checks.check_space(node, probe),
    ]


def check_workstation(workstation: Versions, cluster: Versions) -> list[Finding]:
    """The submitting side needs the same Ray; Python may differ, as nothing is pickled across."""
    if workstation.ray == cluster.ray:
        return []
    same_minor = workstation.ray.split(".")[:2] == cluster.ray.split(".")[:2]
    return [
        Finding(
            check="ray-version",
            level=Level.NOTE if same_minor else Level.WARNING,
            where="workstation",
            message=f"Ray is {workstation.ray} here and {cluster.ray} on the cluster",
            remedy=f"pip install 'ray[default]=={cluster.ray}' on the workstation",
        )
    ]
