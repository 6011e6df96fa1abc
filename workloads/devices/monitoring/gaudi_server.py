"""Needs of a Gaudi server besides its cards, for the doctor. Pure.

Limits that are a matter of judgement are constants here, with their reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from workloads.devices import Complaint, ServerFacts

#: Cards of a server; jobs of two and four cards are legal on aligned groups of them only.
CARDS = 8
#: Habana's example of a Kubernetes job asks for hugepages-2Mi: 95000Mi.
HUGEPAGES_BYTES = 95_000 * 2**20

_GIB = 2**30


def examine(cards: int, facts: ServerFacts) -> Iterator[Complaint]:
    """List deviations from Habana's advice on a server that told Ray of ``cards`` cards."""
    if cards != CARDS:
        yield Complaint(
            check="cards",
            message=f"{cards} of a Gaudi server's {CARDS} cards are Ray's: jobs of two and four "
            "cards run only on aligned groups of them",
            remedy="if all of them are yours, start Ray with "
            f"--resources '{{\"HPU\": {CARDS}, …}}'",
            level="note",
        )
    yield from _driver(facts)
    yield from _hugepages(facts)
    yield from _kernel(facts)


def _driver(facts: ServerFacts) -> Iterator[Complaint]:
    """Driver and software must be of one release: else the first job of every card fails, with
    `synStatus=26 [Generic failure]`."""
    plugin, driver = facts.versions.get("habana-torch-plugin"), facts.driver_version
    if plugin and driver and _release(plugin) != _release(driver):
        yield Complaint(
            check="driver",
            message=f"the driver is {driver}, Habana's PyTorch is {plugin}",
            remedy="use the image of the driver's version (`hl-smi` prints it), or update the "
            "driver; Habana supports equal versions only",
            level="error",
        )


def _hugepages(facts: ServerFacts) -> Iterator[Complaint]:
    """Gaudi's runtime passes host buffers through huge pages."""
    reserved = facts.hugepages_total * facts.hugepage_bytes
    if reserved < HUGEPAGES_BYTES:
        pages = -(-HUGEPAGES_BYTES // (facts.hugepage_bytes or 2 * 2**20))
        yield Complaint(
            check="hugepages",
            message=f"{reserved / _GIB:.0f} GiB of huge pages are reserved; Habana's example asks "
            f"for {HUGEPAGES_BYTES / _GIB:.0f} GiB",
            remedy=f"sudo sysctl -w vm.nr_hugepages={pages} on the server (and in "
            "/etc/sysctl.d/ to stay)",
        )


def _kernel(facts: ServerFacts) -> Iterator[Complaint]:
    """Linux 6.8 without IOMMU passthrough is known to garble what Gaudi computes."""
    passthrough = "iommu=pt" in facts.kernel_arguments.split()
    if _release(facts.kernel.rpartition(" ")[2]) >= (6, 8) and not passthrough:
        yield Complaint(
            check="iommu",
            message=f"{facts.kernel} runs without IOMMU passthrough, with which models on Gaudi "
            "are known to write garbage",
            remedy='GRUB_CMDLINE_LINUX_DEFAULT="iommu=pt intel_iommu=on" in /etc/default/grub, '
            "then update-grub and a reboot",
        )


def _release(version: str) -> tuple[int, int]:
    """The first two numbers: 1.24 of ``1.24.1-b336d5e``; zeros where there are none."""
    parts = [int(part) if part.isdigit() else 0 for part in re.split(r"[.-]", version)[:2]]
    return (*parts, 0, 0)[0], (*parts, 0, 0)[1]
