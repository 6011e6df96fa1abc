"""Judging what an examination found: one function a check, each from facts to findings. Pure.

A finding says what is wrong where, and what to do. ERROR is for what would make a run fail, wholly
or on that node; WARNING for what would make it slow, or its figures doubtful; NOTE for the rest.
Limits that are a matter of judgement are constants here, with their reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from orchestrator.doctor.facts import ClusterFacts, Finding, Level, NodeFacts, Probe, Versions
from orchestrator.job import Accelerator

#: Times in rows of different nodes are compared to the second, and leases to half of it.
CLOCK_LIMIT_S = 0.5
#: Ray's session logs and spilled objects; a full disk there looks like a crash of the job.
RAY_SPACE_BYTES = 10 * 2**30
#: Rows are small; checkpoints and adapters are not.
RESULTS_SPACE_BYTES = 5 * 2**30
#: One 6-billion-parameter model in bf16 and its converted copy.
MODEL_SPACE_BYTES = 30 * 2**30
#: Ray's own advice; eight workers with their data loaders and sockets come near the usual 1,024.
OPEN_FILES = 65_536
#: What collectives of eight processes and data loaders pass through /dev/shm.
SHARED_MEMORY_BYTES = 8 * 2**30
#: Habana's example of a Kubernetes job asks for hugepages-2Mi: 95000Mi.
HUGEPAGES_BYTES = 95_000 * 2**20
#: Cards of a Gaudi server; jobs of two and four cards are legal on aligned groups of them only.
GAUDI_SERVER_CARDS = 8

#: Packages that rows of two nodes must share to be comparable.
_COMPARED = ("nightgrid", "torch", "transformers", "optimum-habana", "deepspeed", "peft")
_GIB = 2**30


def judge(facts: ClusterFacts) -> list[Finding]:
    """All findings, the worst first, then by node."""
    found = [
        *check_nodes(facts),
        *check_token(facts),
        *check_dashboard(facts),
        *check_shared(facts),
        *check_versions(facts),
    ]
    for node in facts.nodes:
        if node.probe is not None:
            found += check_node(node, node.probe)
    return sorted(found, key=lambda finding: (-finding.level, finding.where, finding.check))


def check_node(node: NodeFacts, probe: Probe) -> list[Finding]:
    """All that concerns one node alone."""
    return [
        *check_imports(node, probe),
        *check_cards(node, probe),
        *check_accounts(node),
        *check_driver(node, probe),
        *check_clock(node),
        *check_hugepages(node, probe),
        *check_kernel(node, probe),
        *check_limits(node, probe),
        *check_space(node, probe),
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


# ---------------------------------------------------------------- the cluster


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
            kinds = " and ".join(sorted(map(str, node.cards)))
            yield Finding(
                check="cards",
                level=Level.ERROR,
                where=node.name,
                message=f"it has {kinds} cards; a run refuses a node of two kinds",
                remedy='start it with one kind: --num-gpus 0, or --resources without "HPU"',
            )
    if not any(node.cards for node in alive):
        yield Finding(
            check="cards",
            level=Level.ERROR,
            where="cluster",
            message="no node has told Ray of any HPU or GPU card",
            remedy="start Gaudi nodes with --resources "
            """'{"HPU": 8, "accelerator_type:Intel-GAUDI2": 1}'; """
            "NVIDIA cards are found by Ray where the driver works (`nvidia-smi`)",
        )


def check_token(facts: ClusterFacts) -> Iterator[Finding]:
    """Whoever reaches a cluster without a token runs code on every node."""
    if not facts.token and not facts.emulated:
        yield Finding(
            check="token",
            level=Level.ERROR,
            where="cluster",
            message="it asks nobody for a token: whoever reaches its ports runs code on all nodes",
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
    for package in _COMPARED:
        by_version: dict[str, list[str]] = defaultdict(list)
        kinds: dict[str, set[Accelerator]] = defaultdict(set)
        for node, probe in probes:
            if node.cards:
                version = probe.versions.get(package, "none")
                by_version[version].append(node.name)
                kinds[version] |= set(node.cards)
        if len(by_version) < 2:
            continue
        # Gaudi and NVIDIA servers differ by nature; nodes of one kind should not.
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


# ---------------------------------------------------------------- one node


def check_imports(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """What a job imports is there, and imports."""
    for package, error in probe.import_errors.items():
        yield Finding(
            check="imports",
            level=Level.ERROR if node.cards else Level.NOTE,
            where=node.name,
            message=f"{package} does not import: {error}",
            remedy="install it in the node's image or environment (clusters/gaudi.Dockerfile, "
            "clusters/gpu.Dockerfile); on Gaudi never let pip replace Habana's torch",
        )
    versions = probe.versions
    if "optimum-habana" in versions and _release(versions.get("transformers", "0")) >= (4, 56):
        yield Finding(
            check="imports",
            level=Level.ERROR,
            where=node.name,
            message=f"transformers {versions['transformers']} is too new for optimum-habana "
            f"{versions['optimum-habana']}",
            remedy="pip install -c constraints-hpu.txt transformers (below 4.56)",
        )


def check_cards(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Ray's count is that of the vendor's tool, and no process has a card open."""
    if node.emulated:
        return
    for kind, told in node.cards.items():
        tool = {Accelerator.HPU: "hl-smi", Accelerator.GPU: "nvidia-smi"}.get(kind)
        if tool is None:
            continue
        if not probe.cards:
            yield Finding(
                check="cards",
                level=Level.ERROR,
                where=node.name,
                message=f"Ray was told of {told} {kind} cards, and {tool} shows none",
                remedy="is the driver loaded (`hl-smi` on the server, outside of the container), "
                "and was the container started with --runtime=habana and "
                "HABANA_VISIBLE_DEVICES=all?"
                if kind is Accelerator.HPU
                else "does `nvidia-smi` work on the server, and was the container started with "
                "--gpus=all?",
            )
            continue
        if len(probe.cards) != told:
            yield Finding(
                check="cards",
                level=Level.ERROR if len(probe.cards) < told else Level.NOTE,
                where=node.name,
                message=f"Ray was told of {told} {kind} cards, and {tool} shows {len(probe.cards)}",
                remedy="start Ray with the number that is there; a card that has gone needs a "
                "reset or a reboot of the server",
            )
        if kind is Accelerator.HPU and told != GAUDI_SERVER_CARDS:
            yield Finding(
                check="cards",
                level=Level.NOTE,
                where=node.name,
                message=f"{told} of a Gaudi server's {GAUDI_SERVER_CARDS} cards are Ray's: jobs of "
                "two and four cards run only on aligned groups of them",
                remedy="if all of them are yours, start Ray with "
                f"--resources '{{\"HPU\": {GAUDI_SERVER_CARDS}, …}}'",
            )
    for card in probe.cards:
        if card.temperature_c == 0:
            yield Finding(
                check="cards",
                level=Level.ERROR,
                where=node.name,
                message=f"card {card.index} has 0 °C: it did not come up",
                remedy='reboot the server; Habana\'s "System Verifications" says so of `0C`',
            )
        if card.occupied:
            yield Finding(
                check="cards-free",
                level=Level.WARNING,
                where=node.name,
                message=card.occupied,
                remedy="end that process; a run waits half a minute, then leaves the card out",
            )


def check_accounts(node: NodeFacts) -> Iterator[Finding]:
    """Nobody else has the cards in Ray's accounts."""
    total = sum(node.cards.values())
    if node.cards_free < total:
        yield Finding(
            check="cards-free",
            level=Level.WARNING,
            where=node.name,
            message=f"{total - node.cards_free} of {total} cards are held in Ray's accounts",
            remedy="another run or somebody's actors: `ray list actors`, `nightgrid status`; a run "
            "takes the free ones and leaves these alone",
        )


def check_driver(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Habana's driver and software are of one release: else the first job of every card fails, with
    `synStatus=26 [Generic failure]`."""
    plugin = probe.versions.get("habana-torch-plugin")
    if Accelerator.HPU not in node.cards or not plugin or not probe.driver_version:
        return
    if _release(plugin) != _release(probe.driver_version):
        yield Finding(
            check="driver",
            level=Level.ERROR,
            where=node.name,
            message=f"the driver is {probe.driver_version}, Habana's PyTorch is {plugin}",
            remedy="use the image of the driver's version (`hl-smi` prints it), or update the "
            "driver; Habana supports equal versions only",
        )


def check_clock(node: NodeFacts) -> Iterator[Finding]:
    """The clock agrees with the driver's, as far as a round trip can tell."""
    clock = node.clock
    if clock is None or abs(clock.offset_s) - clock.bound_s <= CLOCK_LIMIT_S:
        return
    way = "ahead of" if clock.offset_s > 0 else "behind"
    yield Finding(
        check="clock",
        level=Level.WARNING,
        where=node.name,
        message=f"its clock is {abs(clock.offset_s):.2f} s (±{clock.bound_s:.3f} s) {way} the "
        "driver's",
        remedy="`timedatectl set-ntp true` on both servers: times in rows would be wrong by that",
    )


def check_hugepages(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Gaudi's runtime passes host buffers through huge pages."""
    if Accelerator.HPU not in node.cards or node.emulated:
        return
    reserved = probe.hugepages_total * probe.hugepage_bytes
    if reserved < HUGEPAGES_BYTES:
        pages = -(-HUGEPAGES_BYTES // (probe.hugepage_bytes or 2 * 2**20))
        yield Finding(
            check="hugepages",
            level=Level.WARNING,
            where=node.name,
            message=f"{reserved / _GIB:.0f} GiB of huge pages are reserved; Habana's example asks "
            f"for {HUGEPAGES_BYTES / _GIB:.0f} GiB",
            remedy=f"sudo sysctl -w vm.nr_hugepages={pages} on the server (and in "
            "/etc/sysctl.d/ to stay)",
        )


def check_kernel(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Linux 6.8 without IOMMU passthrough is known to garble what Gaudi computes."""
    if Accelerator.HPU not in node.cards or node.emulated:
        return
    words = probe.kernel_arguments.split()
    if _release(probe.kernel.rpartition(" ")[2]) >= (6, 8) and "iommu=pt" not in words:
        yield Finding(
            check="iommu",
            level=Level.WARNING,
            where=node.name,
            message=f"{probe.kernel} runs without IOMMU passthrough, with which models on Gaudi "
            "are known to write garbage",
            remedy='GRUB_CMDLINE_LINUX_DEFAULT="iommu=pt intel_iommu=on" in /etc/default/grub, '
            "then update-grub and a reboot",
        )


def check_limits(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Open files, locked memory and shared memory suffice for a server full of workers."""
    if node.emulated or not node.cards:
        return
    if 0 <= probe.open_files < OPEN_FILES:
        yield Finding(
            check="limits",
            level=Level.WARNING,
            where=node.name,
            message=f"a process may open {probe.open_files} files",
            remedy=f"--ulimit=nofile=1048576:1048576 in run_options, or `ulimit -n {OPEN_FILES}` "
            "before `ray start`",
        )
    if probe.locked_bytes >= 0 and Accelerator.CPU not in node.cards:
        yield Finding(
            check="limits",
            level=Level.WARNING,
            where=node.name,
            message=f"a process may lock {probe.locked_bytes // 1024} KiB of memory; buffers of "
            "cards want to be locked",
            remedy="--ulimit=memlock=-1:-1 in run_options, or `ulimit -l unlimited`",
        )
    if probe.shared_memory_bytes < SHARED_MEMORY_BYTES:
        yield Finding(
            check="limits",
            level=Level.WARNING,
            where=node.name,
            message=f"/dev/shm has {probe.shared_memory_bytes / _GIB:.1f} GiB free",
            remedy="--ipc=host in run_options (docker gives a container 64 MiB otherwise)",
        )


def check_space(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Disks have room; a full one under Ray looks like a crash of the job."""
    wanted = {
        "Ray's files": RAY_SPACE_BYTES,
        "results": RESULTS_SPACE_BYTES,
        "models": MODEL_SPACE_BYTES,
    }
    for space in probe.spaces:
        limit = wanted[space.purpose]
        if space.free_bytes < limit:
            yield Finding(
                check="disk",
                level=Level.ERROR if space.free_bytes < limit / 10 else Level.WARNING,
                where=node.name,
                message=f"{space.free_bytes / _GIB:.1f} GiB are free for {space.purpose} at "
                f"{space.path}, less than {limit / _GIB:.0f}",
                remedy="free some, or put it elsewhere: "
                + {
                    "Ray's files": "ray start --temp-dir",
                    "results": "--results DIR or NIGHTGRID_RESULTS",
                    "models": "HF_HOME, NIGHTGRID_CACHE",
                }[space.purpose],
            )


def _release(version: str) -> tuple[int, int]:
    """The first two numbers: 1.24 of ``1.24.1-b336d5e``; zeros where there are none."""
    numbers = []
    for part in version.replace("-", ".").split(".")[:2]:
        numbers.append(int(part) if part.isdigit() else 0)
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (numbers[0] if numbers else 0, 0)


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
