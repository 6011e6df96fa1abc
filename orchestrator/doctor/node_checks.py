"""Checks of one node: its packages, cards, driver, clock, kernel, limits and disks. Pure.

Limits that are a matter of judgement are constants here, with their reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.doctor.facts import Finding, Level, NodeFacts, Probe
from workloads.engines import ENGINES
from workloads.models.quantized_checkpoints import PACKAGES

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
#: Space in /dev/shm that collectives of eight processes and data loaders need.
SHARED_MEMORY_BYTES = 8 * 2**30

_GIB = 2**30


def check_imports(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Check that the packages which a job imports are there, and import."""
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
    for spec in ENGINES.values():
        for needed in spec.packages:
            for other, limit in needed.below.items():
                if needed.name not in versions or other not in versions:
                    continue
                if _release(versions[other]) >= _release(limit):
                    yield Finding(
                        check="imports",
                        level=Level.ERROR,
                        where=node.name,
                        message=f"{other} {versions[other]} is too new for {needed.name} "
                        f"{versions[needed.name]}",
                        remedy=f"{spec.install} ({other} below {limit})",
                    )


def check_quantization(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Name what cannot be read where models are quantised at all (torchao is there)."""
    if "torchao" not in probe.versions:
        return
    for package, (install, kinds) in PACKAGES.items():
        if package not in probe.versions:
            yield Finding(
                check="quantization",
                level=Level.NOTE,
                where=node.name,
                message=f"{package} is not installed: jobs with checkpoints of "
                f"{', '.join(kinds)} become UNSUPPORTED rows",
                remedy=install,
            )


def check_cards(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Ray's count is that of the vendor's tool, and no process has a card open."""
    if node.emulated:
        return
    for kind, told in node.cards.items():
        tool = kind.spec.tool
        if not tool:
            continue
        if not probe.cards:
            yield Finding(
                check="cards",
                level=Level.ERROR,
                where=node.name,
                message=f"Ray has {told} {kind} cards, but {tool} shows none",
                remedy=kind.spec.no_cards_remedy,
            )
        elif len(probe.cards) != told:
            yield Finding(
                check="cards",
                level=Level.ERROR if len(probe.cards) < told else Level.NOTE,
                where=node.name,
                message=f"Ray has {told} {kind} cards, but {tool} shows {len(probe.cards)}",
                remedy="start Ray with the number that is there; a card that has gone needs a "
                "reset or a reboot of the server",
            )
        seen = {kind.spec.product(card.product) for card in probe.cards} - {""}
        named = kind.spec.product(node.device_name)
        if named and seen and seen != {named}:
            yield Finding(
                check="cards",
                level=Level.WARNING,
                where=node.name,
                message=f"Ray calls its cards {node.device_name}, {tool} says "
                f"{' and '.join(sorted(seen))}",
                remedy="start Ray with the accelerator_type of the cards that are there",
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
    """Check that no other run holds the cards in Ray's accounts."""
    total = sum(node.cards.values())
    if node.cards_free < total:
        yield Finding(
            check="cards-free",
            level=Level.WARNING,
            where=node.name,
            message=f"{total - node.cards_free} of {total} cards are held in Ray's accounts",
            remedy="another run or actors hold them: `ray list actors`, `nightgrid status`; a run "
            "takes the free ones and leaves these alone",
        )


def check_server(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Check what the cards of the node need of their server, as their devices tell."""
    for kind, told in () if node.emulated else node.cards.items():
        for complaint in kind.spec.examine(told, probe):
            yield Finding(
                check=complaint.check,
                level=Level[complaint.level.upper()],
                where=node.name,
                message=complaint.message,
                remedy=complaint.remedy,
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


def check_limits(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Open files, locked memory and shared memory suffice for a server full of workers."""
    if node.emulated or not node.cards:
        return
    if 0 <= probe.open_files < OPEN_FILES:
        yield Finding(
            check="limits",
            level=Level.WARNING,
            where=node.name,
            message=f"a process may open {probe.open_files:,} files",
            remedy=f"--ulimit=nofile=1048576:1048576 in run_options, or `ulimit -n {OPEN_FILES}` "
            "before `ray start`",
        )
    if probe.locked_bytes >= 0 and any(kind.spec.can("pinned_memory") for kind in node.cards):
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
