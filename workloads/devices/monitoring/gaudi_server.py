"""Needs of a Gaudi server besides its cards, for the doctor. Pure.

Limits that are a matter of judgement are constants here, with their reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from workloads.devices import Complaint, ServerFacts
from workloads.devices.monitoring.gaudi_products import product_of

#: Cards of a server; jobs of two and four cards are legal on aligned groups of them only.
CARDS = 8

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
    if facts.cards and len(facts.cards) not in (1, 2, 4, CARDS):  # nobody gives a part of these
        there = {card.index for card in facts.cards}
        gone = ", ".join(str(index) for index in range(CARDS) if index not in there)
        yield Complaint(
            check="cards",
            message=f"hl-smi shows {len(facts.cards)} of the server's {CARDS} cards; the module "
            f"ids {gone} are missing",
            remedy="`sudo dmesg` on the server says why; a reset or a reboot brings them back",
        )
    yield from _links(facts)
    yield from _driver(facts)
    yield from _torch(facts)
    yield from _hugepages(facts)
    yield from _kernel(facts)
    yield from _processors(facts)


def intel_torch(version: str) -> bool:
    """Tell if this is a version of Intel's fork of torch, as the bridge tells."""
    return version.partition("+")[2].startswith("git")


def _links(facts: ServerFacts) -> Iterator[Complaint]:
    """Collectives go over the internal ports, which are down after every load of the driver."""
    down = {
        card.index: f"{card.links_up} of {card.links}"
        for card in facts.cards
        if card.links and card.links_up is not None and card.links_up < card.links
    }
    if down:
        told = ", ".join(f"card {index} has {ports}" for index, ports in sorted(down.items()))
        products = {product_of(card.product) for card in facts.cards if card.index in down}
        generation = next((each.name.lower() for each in products if each), "gaudi2")
        yield Complaint(
            check="ports",
            message=f"internal ports are down ({told} up): jobs of several cards fail or hang",
            remedy=f"sudo /opt/habanalabs/qual/{generation}/bin/manage_network_ifs.sh --up on the "
            "server, after every load of the driver (package habanalabs-qual)",
            level="error",
        )


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


def _torch(facts: ServerFacts) -> Iterator[Complaint]:
    """Lazy mode asserts Intel's fork of torch; DeepSpeed for Gaudi is a fork, too."""
    torch = facts.versions.get("torch", "")
    if "habana-torch-plugin" in facts.versions and torch and not intel_torch(torch):
        yield Complaint(
            check="torch",
            message=f"torch {torch} is the stock one: lazy mode does not start "
            "with it (hpu_mode lazy, the default of optimum-habana)",
            remedy="the image pytorch-installer-… has Intel's torch; with this one write "
            "hpu_mode: compile, or engine: vllm-gaudi",
            level="note",
        )
    deepspeed = facts.versions.get("deepspeed")
    if deepspeed is not None and not re.search(r"\+hpu\.|synapse", deepspeed):
        yield Complaint(
            check="deepspeed",
            message=f"deepspeed {deepspeed} is the stock one, which does not know hpu",
            remedy="pip install git+https://github.com/HabanaAI/DeepSpeed.git@1.23.0 (the newest "
            "tag of Habana's fork; clusters/gaudi.Dockerfile has it)",
        )


def _hugepages(facts: ServerFacts) -> Iterator[Complaint]:
    """Gaudi's runtime passes host buffers through huge pages. The driver's installer reserves what
    its cards need, so what is there is right unless somebody else asks for less."""
    if not facts.hugepages_total:
        yield Complaint(
            check="hugepages",
            message="no huge pages are reserved, though the driver's installer reserves some",
            remedy="install the driver's package again (habanalabs-installer.sh), and leave "
            "vm.nr_hugepages to it",
        )
        return
    for file, pages in facts.hugepages_asked.items():
        if pages < facts.hugepages_total:
            reserved = facts.hugepages_total * facts.hugepage_bytes / _GIB
            yield Complaint(
                check="hugepages",
                message=f"{file} asks for {pages} huge pages, and {facts.hugepages_total} "
                f"({reserved:.0f} GiB) are reserved: after a reboot there are fewer",
                remedy=f"remove vm.nr_hugepages from {file}; the driver's installer sets it",
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


def _processors(facts: ServerFacts) -> Iterator[Complaint]:
    """The host launches every graph, so cores that are slow or asleep keep cards waiting."""
    slow = {name: count for name, count in facts.governors.items() if name != "performance"}
    if slow:
        cores = sum(facts.governors.values())
        told = ", ".join(f"{name} on {count} of {cores} cores" for name, count in slow.items())
        yield Complaint(
            check="governor",
            message=f"the CPU governor is not performance ({told})",
            remedy="echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/"
            "scaling_governor on the server, before containers start",
        )
    if facts.max_cstate and _release(facts.kernel.rpartition(" ")[2]) >= (5, 9):
        yield Complaint(
            check="idle-states",
            message=f"idle cores may sleep down to state C{facts.max_cstate}",
            remedy='GRUB_CMDLINE_LINUX_DEFAULT="intel_idle.max_cstate=0" in /etc/default/grub, '
            "then update-grub and a reboot",
        )


def _release(version: str) -> tuple[int, int]:
    """The first two numbers: 1.24 of ``1.24.1-b336d5e``; zeros where there are none."""
    parts = [int(part) if part.isdigit() else 0 for part in re.split(r"[.-]", version)[:2]]
    return (*parts, 0, 0)[0], (*parts, 0, 0)[1]
