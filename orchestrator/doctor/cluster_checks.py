"""Checks of a whole cluster: its nodes, its doors, what nodes share, their versions. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from orchestrator.core.job import Accelerator
from orchestrator.doctor.facts import ClusterFacts, Finding, Level, Versions
from workloads.devices import all_devices
from workloads.engines import engine_packages

#: Packages that rows of two nodes must share to be comparable.
_COMPARED = ("nightgrid", "torch", "deepspeed", "peft")  # and those of engines


def check_nodes(facts: ClusterFacts) -> Iterator[Finding]:
    """Nodes that are missing, dead, silent, or of two kinds; a cluster without cards."""
    alive = [node for node in facts.nodes if node.alive]
    if facts.expected_nodes is not None and len(alive) < facts.expected_nodes:
        yield Finding(
            check="nodes",
            level=Level.ERROR,
            where="cluster",
            message=f"{len(alive)} of {facts.expected_nodes} expected nodes are in the cluster",
            remedy="look at `ray monitor cluster.yaml`; on the missing server, at `docker logs "
            "nightgrid`. A node with another Ray or Python version, or without the token, cannot "
            "join",
        )
    for node in facts.nodes:
        if not node.alive:
            yield Finding(
                check="nodes",
                level=Level.WARNING,
                where=node.name,
                message="it was in the cluster and is dead",
                remedy="`ray up cluster.yaml` starts it again; its /tmp/ray/session_latest/logs "
                "(raylet.out) say why it died",
            )
        elif node.probe is None:
            yield Finding(
                check="answer",
                level=Level.ERROR,
                where=node.name,
                message=node.trouble,
                remedy="is the server frozen or out of memory? `ray stop` and `ray start` there, "
                "or take it out of the cluster",
            )
        if len(node.cards) > 1:
            both = " and ".join(sorted(node.cards))
            yield Finding(
                check="cards",
                level=Level.ERROR,
                where=node.name,
                message=f"it has {both} cards; a run refuses a node of two kinds",
                remedy=f"start it with one kind: {', or '.join(map(_without, node.cards))}",
            )
    if not any(node.cards for node in alive):
        apart = [spec for spec in all_devices() if not spec.host]
        kinds = [spec.accelerator for spec in apart]
        yield Finding(
            check="cards",
            level=Level.ERROR,
            where="cluster",
            message=f"no node has registered a {' or '.join(kinds)} card with Ray",
            remedy="; ".join(filter(None, (spec.registration for spec in apart))),
        )


def check_token(facts: ClusterFacts) -> Iterator[Finding]:
    """Whoever reaches a cluster without a token runs code on every node."""
    if not facts.token and not facts.emulated:
        yield Finding(
            check="token",
            level=Level.ERROR,
            where="cluster",
            message="it asks for no token: anyone who reaches its ports can run code on all nodes",
            remedy="RAY_AUTH_MODE=token on every node and workstation (docs/security.md)",
        )


def check_dashboard(facts: ClusterFacts) -> Iterator[Finding]:
    """The job interface belongs on the loopback interface, behind an SSH tunnel."""
    host = (facts.dashboard or "").rpartition(":")[0].strip("[]")
    if host and not host.startswith("127.") and host not in ("localhost", "::1"):
        yield Finding(
            check="dashboard",
            level=Level.WARNING if facts.token else Level.ERROR,
            where="cluster",
            message=f"the dashboard, with its job interface, listens on {facts.dashboard}",
            remedy="start the head with --dashboard-host=127.0.0.1 and use an SSH tunnel",
        )


def check_shared(facts: ClusterFacts) -> Iterator[Finding]:
    """Every node sees what the driver writes, and the driver what the nodes write."""
    if facts.shared_dir is None:
        return
    if facts.shared_trouble:
        yield Finding(
            check="shared",
            level=Level.ERROR,
            where="driver",
            message=f"it cannot write to {facts.shared_dir}: {facts.shared_trouble}",
            remedy="mount it read-write where the driver runs, for the user that Ray runs as",
        )
        return
    for node in facts.nodes:
        shared = node.probe.shared if node.probe else None
        if shared is None or (shared.readable and shared.written):
            continue
        what = (
            "sees nothing of what the driver writes to"
            if not shared.readable
            else "cannot write to"
        )
        yield Finding(
            check="shared",
            level=Level.ERROR if not shared.readable else Level.WARNING,
            where=node.name,
            message=f"it {what} {facts.shared_dir}"
            + (f": {shared.trouble}" if shared.trouble else ""),
            remedy=f"mount the same file system at {facts.shared_dir} on every server, and into "
            "the container (-v in run_options); docker makes a missing directory, empty",
        )


def check_versions(facts: ClusterFacts) -> Iterator[Finding]:
    """Python, Ray and what rows depend on are the same on all nodes that compute alike."""
    probes = [(node, node.probe) for node in facts.nodes if node.probe is not None]
    for node, probe in probes:
        here = Versions(ray=probe.versions.get("ray", "?"), python=probe.python)
        if here.python.split(".")[:2] != facts.driver.python.split(".")[:2]:
            level = Level.ERROR
        else:
            level = Level.WARNING
        if here != facts.driver:
            yield Finding(
                check="ray-version",
                level=Level.ERROR if here.ray != facts.driver.ray else level,
                where=node.name,
                message=f"it has Ray {here.ray} and Python {here.python}, the driver "
                f"{facts.driver.ray} and {facts.driver.python}",
                remedy="run every node from the same image, or environments made alike",
            )
    for package in (*_COMPARED, *engine_packages()):
        by_version: dict[str, list[str]] = defaultdict(list)
        kinds: dict[str, set[Accelerator]] = defaultdict(set)
        for node, probe in probes:
            if node.cards:
                version = probe.versions.get(package, "none")
                by_version[version].append(node.name)
                kinds[version] |= set(node.cards)
        if len(by_version) < 2:
            continue
        # Servers of unlike cards differ by nature; nodes of one kind should not.
        shared_kind = any(
            kinds[a] & kinds[b] for a in kinds for b in kinds if a < b
        )  # fmt: skip
        told = ", ".join(
            f"{version} on {_names(names)}" for version, names in sorted(by_version.items())
        )
        yield Finding(
            check="versions",
            level=Level.WARNING if shared_kind else Level.NOTE,
            where="cluster",
            message=f"{package} is {told}",
            remedy="nodes of one kind should run the same image: their rows are compared"
            if shared_kind
            else "",
        )


def _without(kind: Accelerator) -> str:
    """Option that starts Ray without cards of a kind."""
    option, resource = kind.spec.ray_option, kind.spec.ray_resource
    return f"--{option.replace('_', '-')} 0" if option else f'--resources without "{resource}"'


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
