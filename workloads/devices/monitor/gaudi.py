"""Read Gaudi cards by HLML, the library beneath hl-smi, through Habana's ``pyhlml``.

Unlike hl-smi it reports energy, clocks and throttling; it never acquires a card. Units: power in
mW, energy in mJ since the driver was loaded, memory in bytes, clocks in MHz, utilization over the
past second. Habana's images have the package; the library comes with the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.devices import CardFacts, Finding, Level, ServerFacts, release_of
from workloads.devices.base import LibraryCalls, command_output
from workloads.devices.monitor.host import (
    CardTelemetry,
    CardUse,
    Holder,
    attempt,
    csv_rows,
    library_telemetry,
    number_of,
    telemetry_of,
)

#: ``hlmlInit`` and ``hlmlShutdown`` set one variable of the whole process.
_CALLS = LibraryCalls()


def hlml_telemetry() -> dict[int, CardTelemetry]:
    """Read this host's cards by module id; empty without the package, library or driver."""
    try:
        hlml = importlib.import_module("pyhlml")
    except ImportError:
        return {}
    with contextlib.suppress(ImportError):  # the module that prints if there is no library
        vars(importlib.import_module("pyhlml.hlml_lib"))["print"] = lambda *_: None
    return _CALLS.call(lambda: _read(hlml)) or {}


def _read(hlml: Any) -> dict[int, CardTelemetry]:
    hlml.hlmlInit()
    try:
        handles = (
            attempt(hlml.hlmlDeviceGetHandleByIndex, index)
            for index in range(hlml.hlmlDeviceGetCount())
        )
        cards = (attempt(_card, hlml, handle) for handle in handles if handle is not None)
        return dict(card for card in cards if card is not None)  # a lost one has no module id
    finally:
        with contextlib.suppress(Exception):
            hlml.hlmlShutdown()


def with_lost(
    readings: Mapping[int, CardTelemetry], root: Path = Path("/")
) -> dict[int, CardTelemetry]:
    """Add the modules whose device files are here but which neither library nor tool lists."""
    files = _device_files(root) if readings else {}
    here = {module for file, module in files.items() if (root / file.lstrip("/")).exists()}
    lost = CardTelemetry(lost="its device file is here, but hl-smi does not list it")
    return {**readings, **dict.fromkeys(here - readings.keys(), lost)}


def _card(hlml: Any, handle: Any) -> tuple[int, CardTelemetry]:
    """Return one card's module id and readings; None for those the driver refuses."""

    def ask(name: str, *arguments: Any) -> Any:
        return attempt(getattr(hlml, f"hlmlDeviceGet{name}"), handle, *arguments)

    module_id, names = int(hlml.hlmlDeviceGetModuleID(handle)), hlml.hlml_t
    bits = {
        "power cap": int(names.HLML_DEFINE.HLML_CLOCKS_THROTTLE_REASON_POWER),
        "temperature (hardware)": int(names.HLML_DEFINE.HLML_CLOCKS_THROTTLE_REASON_THERMAL),
    }
    card = library_telemetry(
        ask,
        names.HLML_TEMP_SENS.HLML_TEMPERATURE_ON_AIP,
        names.HLML_CLOCK_TYPE.HLML_CLOCK_MME,
        "aip",
        ("CurrentClocksThrottleReasons", bits),
    )
    source = "" if card.power_w is None else "HLML, hlmlDeviceGetPowerUsage"
    return module_id, dataclasses.replace(card, power_of=source)


# Read Gaudi cards by ``hl-smi``, Habana's monitoring tool, which never acquires one.
#
# Queries follow Habana's page "System Management Interface Tool (hl-smi)". In recorded outputs,
# headers keep units despite ``nounits``, all fields but the first begin with a blank, and ``index``
# follows the driver's order, not module ids. In a container only its own processes are listed.

QUERY = (
    "index,module_id,name,driver_version,power.draw,temperature.aip,utilization.aip,memory.used,"
    "memory.total"
)
COMMAND = ("hl-smi", "-Q", QUERY, "-f", "csv,nounits")

_PROCESS = re.compile(
    r"^\|\s+(?P<index>\d+)\s+(?P<pid>\d+)\s+\S\s+(?P<name>.+?)\s+(?P<mib>\d+)\s*MiB[\s|]*$"
)
#: A card's two lines in that table: index and product, then power and its limit.
_NAMED = re.compile(r"^\|\s+(?P<index>\d+)\s+HL-\S+\s")
_DRAWN = re.compile(r"(?P<watts>\d+)\s*W\s*/\s*\d+\s*W")

#: The query reports one rail; the table adds both.
RAIL_POWER = "hl-smi -Q power.draw, the 54 V rail alone"
WHOLE_POWER = "hl-smi's table, the 54 V and 12 V rails"


@dataclass(frozen=True, slots=True, kw_only=True)
class GaudiCard:
    """One card as hl-smi lists it."""

    index: int  # in the driver's order, as in the process table
    module_id: int  # as in HABANA_VISIBLE_MODULES
    name: str = ""  # HL-225 is Gaudi2
    telemetry: CardTelemetry


def cards() -> list[GaudiCard]:
    """List this host's cards by module id; empty if hl-smi is missing or fails."""
    return parse_cards(command_output(*COMMAND))


def hl_smi_telemetry() -> dict[int, CardTelemetry]:
    """Read this host's cards by module id; hl-smi reports no energy."""
    listed = cards()
    whole = parse_power(command_output("hl-smi")) if listed else {}
    return {
        card.module_id: dataclasses.replace(
            card.telemetry, power_w=whole[card.index], power_of=WHOLE_POWER
        )
        if card.index in whole
        else card.telemetry
        for card in listed
    }


def hl_smi_use(module_id: int) -> CardUse:
    """Return the processes on this card now, by open device files and by hl-smi, and its memory."""
    known = holders(module_id)
    card = next((card for card in cards() if card.module_id == module_id), None)
    if card is None:
        return CardUse(holders=tuple(known))
    pids = {holder.pid for holder in known}
    listed = parse_processes(command_output("hl-smi")).get(card.index, ())
    known += [holder for holder in listed if holder.pid not in pids]
    return CardUse(holders=tuple(known), used_bytes=card.telemetry.memory_used_bytes)


def parse_cards(text: str) -> list[GaudiCard]:
    """Parse a query with ``index`` and ``module_id``, sorted by the latter; skip other lines."""
    parsed = []
    for row in csv_rows(text):
        index, module_id = number_of(row.get("index")), number_of(row.get("module_id"))
        if index is None or module_id is None:
            continue
        read = telemetry_of(row, "aip")
        if read.power_w is not None:
            read = dataclasses.replace(read, power_of=RAIL_POWER)
        name = row.get("name", "")
        card = GaudiCard(index=int(index), module_id=int(module_id), name=name, telemetry=read)
        parsed.append(card)
    return sorted(parsed, key=lambda card: card.module_id)


def hl_smi_inventory() -> dict[int, CardFacts]:
    """Return the cards' products and internal ports by module id."""
    listed = command_output("hl-smi", "-Q", "module_id,bus_id,name", "-f", "csv,noheader")
    rows = [[word.strip() for word in line.split(",")] for line in listed.splitlines()]

    def inventory(card: list[str]) -> CardFacts:
        module_id, bus_id, name = card
        ports, link = (command_output("hl-smi", "-i", bus_id, "-n", n) for n in ("ports", "link"))
        links, links_up = parse_links(ports, link)
        return CardFacts(index=int(module_id), product=name, links=links, links_up=links_up)

    with ThreadPoolExecutor(max_workers=8) as threads:
        cards = [row for row in rows if len(row) == 3 and row[0].isdecimal()]
        return {card.index: card for card in threads.map(inventory, cards)}


def parse_links(ports: str, link: str) -> tuple[int | None, int | None]:
    """Count internal ports, and those up, capped since ``link`` includes external ports; None if
    there are no internal ones."""
    internal = sum("internal" in line.lower() for line in ports.splitlines())
    up = sum(re.search(r"\bup\b", line.lower()) is not None for line in link.splitlines())
    return (internal, min(up, internal)) if internal else (None, None)


def parse_power(text: str) -> dict[int, float]:
    """Parse the power of each card in hl-smi's table, by hl-smi's index."""
    power_w: dict[int, float] = {}
    index: int | None = None
    for line in text.partition("Compute Processes:")[0].splitlines():
        if named := _NAMED.match(line.strip()):
            index = int(named["index"])
        elif index is not None and (drawn := _DRAWN.search(line)):
            power_w[index] = float(drawn["watts"])
            index = None
    return power_w


def parse_processes(text: str) -> dict[int, list[Holder]]:
    """Parse hl-smi's table "Compute Processes", by hl-smi's index."""
    _, _, table = text.partition("Compute Processes:")
    by_index: dict[int, list[Holder]] = {}
    for line in table.splitlines():
        if match := _PROCESS.match(line.strip()):
            holder = Holder(pid=int(match["pid"]), name=match["name"])
            by_index.setdefault(int(match["index"]), []).append(holder)
    return by_index


def holders(module_id: int, root: Path = Path("/")) -> list[Holder]:
    """List other visible processes that have the card's device file open (driver 1.13 or newer)."""
    files = {file for file, module in _device_files(root).items() if module == module_id}
    if not files:
        return []
    processes = []
    for process in (root / "proc").glob("[0-9]*"):
        pid = int(process.name)
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            opened = any(os.readlink(entry) in files for entry in (process / "fd").iterdir())
            if opened and pid != os.getpid():
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                processes.append(Holder(pid=pid, name=name))
    return sorted(processes, key=lambda holder: holder.pid)


def opened_modules(root: Path = Path("/")) -> set[int]:
    """Return module ids whose device files this process has open; empty if unknown."""
    opened = set()
    for entry in (root / f"proc/{os.getpid()}/fd").glob("*"):
        with contextlib.suppress(OSError):
            opened.add(os.readlink(entry))
    return {module for file, module in _device_files(root).items() if file in opened}


def _device_files(root: Path) -> dict[str, int]:
    module_ids = {}
    for entry in sorted((root / "sys/class/accel").glob("accel[0-9]*")):
        with contextlib.suppress(OSError, ValueError):
            module_id = int((entry / "device/module_id").read_text(encoding="ascii"))
            module_ids[f"/dev/accel/{entry.name}"] = module_id
    return module_ids


# Generations of Gaudi cards.
#
# fp8 hardware scales by powers of two: Gaudi2 has four exponent biases, Gaudi3 the full range
# (Habana's FP8 guide). So calibrations are never carried over between generations.


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One generation of cards."""

    name: str  # its line in devices.csv
    pattern: str  # its names in the driver, hl-smi and the bridge
    ray_type: str  # in Ray's resource ``accelerator_type:…``
    fp8_exponent_biases: str  # in hardware


PRODUCTS = (
    Product(
        name="Gaudi2",
        pattern=r"(Intel[ -])?(Habana )?(HL-225\w*|Gaudi ?2)",
        ray_type="Intel-GAUDI2",
        fp8_exponent_biases="3, 7, 11, 15",
    ),
    Product(
        name="Gaudi3",
        pattern=r"(Intel[ -])?(Habana )?(HL-3(25|38)\w*|Gaudi ?3)",  # modules, PCIe cards
        ray_type="Intel-GAUDI3",
        fp8_exponent_biases="0 to 63",
    ),
)


def product_of(name: str) -> Product | None:
    """Return a card's generation by its name; None for Gaudi1 and unknown names."""
    for product in PRODUCTS:
        if re.fullmatch(product.pattern, name.strip(), re.IGNORECASE):
            return product
    return None


def fp8_scales(name: str) -> str:
    """Describe the fp8 scales of a card's hardware, for rows."""
    if (product := product_of(name)) is None:
        return ""
    return f"exponent biases {product.fp8_exponent_biases} in hardware ({product.name})"


# Checks of a Gaudi server for the doctor. Pure.

#: Cards of a server; jobs of two and four cards need aligned groups.
CARDS = 8


def examine_server(cards: int, facts: ServerFacts) -> Iterator[Finding]:
    """List deviations from Habana's advice on a server that registered ``cards`` cards with Ray."""
    if cards != CARDS:
        yield Finding(
            "cards",
            f"{cards} of a Gaudi server's {CARDS} cards are Ray's: jobs of two and four "
            "cards run only on aligned groups of them",
            f"if all of them are yours, start Ray with --resources '{{\"HPU\": {CARDS}, …}}'",
            Level.NOTE,
        )
    if facts.cards and len(facts.cards) not in (1, 2, 4, CARDS):  # usual sizes of a container
        there = {card.index for card in facts.cards}
        gone = ", ".join(str(index) for index in range(CARDS) if index not in there)
        yield Finding(
            "cards",
            f"hl-smi shows {len(facts.cards)} of the server's {CARDS} cards; the module "
            f"ids {gone} are missing",
            "`sudo dmesg` on the server says why; a reset or a reboot brings them back",
        )
    yield from _links(facts)
    # Driver and software must match: else jobs fail with `synStatus=26 [Generic failure]`.
    plugin, driver = facts.versions.get("habana-torch-plugin"), facts.driver_version
    if plugin and driver and release_of(plugin)[:2] != release_of(driver)[:2]:
        yield Finding(
            "driver",
            f"the driver is {driver}, Habana's PyTorch is {plugin}",
            "use the image of the driver's version (`hl-smi` prints it), or update the "
            "driver; Habana supports equal versions only",
            Level.ERROR,
        )
    yield from _torch(facts)
    yield from _hugepages(facts)
    # Linux 6.8 without IOMMU passthrough is known to corrupt results on Gaudi.
    passthrough = "iommu=pt" in facts.kernel_arguments.split()
    if release_of(facts.kernel.rpartition(" ")[2]) >= (6, 8) and not passthrough:
        yield Finding(
            "iommu",
            f"{facts.kernel} runs without IOMMU passthrough, with which models on Gaudi "
            "are known to write garbage",
            'GRUB_CMDLINE_LINUX_DEFAULT="iommu=pt intel_iommu=on" in /etc/default/grub, '
            "then update-grub and a reboot",
        )
    yield from _processors(facts)


def intel_torch(version: str) -> bool:
    """Tell if this version is Intel's fork of torch, by the bridge's own test."""
    return version.partition("+")[2].startswith("git")


def _links(facts: ServerFacts) -> Iterator[Finding]:
    """Collectives need the internal ports, which are down after every load of the driver."""
    down = {
        card.index: f"{card.links_up} of {card.links}"
        for card in facts.cards
        if card.links and card.links_up is not None and card.links_up < card.links
    }
    if down:
        ports_up = ", ".join(f"card {index} has {ports}" for index, ports in sorted(down.items()))
        products = {product_of(card.product) for card in facts.cards if card.index in down}
        generation = next((product.name.lower() for product in products if product), "gaudi2")
        yield Finding(
            "ports",
            f"internal ports are down ({ports_up} up): jobs of several cards fail or hang",
            f"sudo /opt/habanalabs/qual/{generation}/bin/manage_network_ifs.sh --up on the "
            "server, after every load of the driver (package habanalabs-qual)",
            Level.ERROR,
        )


def _torch(facts: ServerFacts) -> Iterator[Finding]:
    """Lazy mode requires Intel's fork of torch; DeepSpeed for Gaudi is a fork, too."""
    torch = facts.versions.get("torch", "")
    if "habana-torch-plugin" in facts.versions and torch and not intel_torch(torch):
        yield Finding(
            "torch",
            f"torch {torch} is the stock one: lazy mode does not start "
            "with it (hpu_mode lazy, the default of optimum-habana)",
            "the image pytorch-installer-… has Intel's torch; with this one write "
            "hpu_mode: compile, or engine: vllm-gaudi",
            Level.NOTE,
        )
    deepspeed = facts.versions.get("deepspeed")
    if deepspeed is not None and not re.search(r"\+hpu\.|synapse", deepspeed):
        yield Finding(
            "deepspeed",
            f"deepspeed {deepspeed} is the stock one, which does not know hpu",
            "pip install git+https://github.com/HabanaAI/DeepSpeed.git@1.23.0 (the newest "
            "tag of Habana's fork; clusters/gaudi.Dockerfile has it)",
        )


def _hugepages(facts: ServerFacts) -> Iterator[Finding]:
    """Huge pages carry host buffers; the driver's installer reserves enough."""
    if not facts.hugepages_total:
        yield Finding(
            "hugepages",
            "no huge pages are reserved, though the driver's installer reserves some",
            "install the driver's package again (habanalabs-installer.sh), and leave "
            "vm.nr_hugepages to it",
        )
        return
    for file, pages in facts.hugepages_asked.items():
        if pages < facts.hugepages_total:
            reserved = facts.hugepages_total * facts.hugepage_bytes / 2**30
            yield Finding(
                "hugepages",
                f"{file} asks for {pages} huge pages, and {facts.hugepages_total} "
                f"({reserved:.0f} GiB) are reserved: after a reboot there are fewer",
                f"remove vm.nr_hugepages from {file}; the driver's installer sets it",
            )


def _processors(facts: ServerFacts) -> Iterator[Finding]:
    """The host launches every graph, so slow or sleeping cores stall cards."""
    slow = {name: count for name, count in facts.governors.items() if name != "performance"}
    if slow:
        cores = sum(facts.governors.values())
        governors = ", ".join(f"{name} on {count} of {cores} cores" for name, count in slow.items())
        yield Finding(
            "governor",
            f"the CPU governor is not performance ({governors})",
            "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/"
            "scaling_governor on the server, before containers start",
        )
    if facts.max_cstate and release_of(facts.kernel.rpartition(" ")[2]) >= (5, 9):
        yield Finding(
            "idle-states",
            f"idle cores may sleep down to state C{facts.max_cstate}",
            'GRUB_CMDLINE_LINUX_DEFAULT="intel_idle.max_cstate=0" in /etc/default/grub, '
            "then update-grub and a reboot",
        )
