"""Read Gaudi cards by ``hl-smi``, Habana's monitoring tool, which never acquires one.

Options and query names are those of Habana's page "System Management Interface Tool (hl-smi)".
Recorded outputs show what one would not expect: headers keep their units with
``nounits`` too, every field but the first begins with a blank, and ``index`` counts cards in the
order of the driver, which is not that of the module ids by which processes are given cards. The
table of processes has no query of its own and counts by that index. Inside a container it lists
only the container's processes, so the memory in use is what tells of others.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from workloads.devices.base import command_output
from workloads.devices.monitoring.release import CardUse
from workloads.devices.monitoring.telemetry import (
    CardInventory,
    CardTelemetry,
    Holder,
    number,
)

QUERY = (
    "index",
    "module_id",
    "name",
    "driver_version",
    "power.draw",
    "temperature.aip",
    "utilization.aip",
    "memory.used",
    "memory.total",
)
COMMAND = ("hl-smi", "-Q", ",".join(QUERY), "-f", "csv,nounits")

_PROCESS = re.compile(
    r"^\|\s+(?P<index>\d+)\s+(?P<pid>\d+)\s+\S\s+(?P<name>.+?)\s+(?P<mib>\d+)\s*MiB[\s|]*$"
)
#: Two lines of a card in the same table: its index and product, then what it draws of its limit.
_NAMED = re.compile(r"^\|\s+(?P<index>\d+)\s+HL-\S+\s")
_DRAWN = re.compile(r"(?P<watts>\d+)\s*W\s*/\s*\d+\s*W")

#: The query's figure is that of one rail; the table adds up both.
RAIL_POWER = "hl-smi -Q power.draw, the 54 V rail alone"
WHOLE_POWER = "hl-smi's table, the 54 V and 12 V rails"

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GaudiCard:
    """One card as hl-smi lists it."""

    index: int  # in the driver's order; the process table counts by it
    module_id: int  # what HABANA_VISIBLE_MODULES means
    name: str = ""  # HL-225 is Gaudi2
    driver_version: str = ""
    telemetry: CardTelemetry


def cards() -> list[GaudiCard]:
    """The cards of this host, by module id; empty where hl-smi is missing or fails."""
    return parse_cards(command_output(*COMMAND))


def telemetry() -> dict[int, CardTelemetry]:
    """The cards of this host by module id. hl-smi tells no energy."""
    found = cards()
    whole = parse_power(command_output("hl-smi")) if found else {}
    return {card.module_id: _with_power(card, whole.get(card.index)) for card in found}


def _with_power(card: GaudiCard, power_w: float | None) -> CardTelemetry:
    if power_w is None:
        return card.telemetry
    return dataclasses.replace(card.telemetry, power_w=power_w, power_of=WHOLE_POWER)


def use(module_id: int) -> CardUse:
    """Processes and memory on this card now."""
    found = cards()
    listed = parse_processes(command_output("hl-smi")) if found else {}
    return use_in(module_id, found, listed, holders(module_id))


def use_in(
    module_id: int,
    cards: Iterable[GaudiCard],
    processes: Mapping[int, Sequence[Holder]],
    holders: Sequence[Holder],
) -> CardUse:
    """Use of a card by hl-smi's list, by open device files and by its memory. Pure.

    Args:
        module_id: the card.
        cards: as ``cards`` gives them.
        processes: by hl-smi's index, as ``parse_processes`` gives them.
        holders: processes that have the card's device file open.
    """
    card = next((card for card in cards if card.module_id == module_id), None)
    known = dict.fromkeys(holders)
    if card is None:
        return CardUse(holders=tuple(known))
    pids = {holder.pid for holder in known}
    known |= dict.fromkeys(h for h in processes.get(card.index, ()) if h.pid not in pids)
    return CardUse(holders=tuple(known), used_bytes=card.telemetry.memory_used_bytes)


def parse_cards(text: str) -> list[GaudiCard]:
    """The cards in the CSV output of a query with ``index`` and ``module_id``, by module id.

    Columns are found by their headers. A line that is not one of cards is passed over, and a
    figure that is none, such as ``N/A``, stays None.
    """
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    header = [name.partition("[")[0].strip() for name in next(rows, [])]
    found = []
    for row in rows:
        values = {name: value.strip() for name, value in zip(header, row, strict=False)}
        index, module_id = (_figure(values.get(name)) for name in ("index", "module_id"))
        if index is None or module_id is None:
            continue
        found.append(
            GaudiCard(
                index=int(index),
                module_id=int(module_id),
                name=values.get("name", ""),
                driver_version=values.get("driver_version", ""),
                telemetry=CardTelemetry(
                    power_w=(power_w := _figure(values.get("power.draw"))),
                    power_of=RAIL_POWER if power_w is not None else "",
                    temperature_c=_figure(values.get("temperature.aip")),
                    utilization_percent=_figure(values.get("utilization.aip")),
                    memory_used_bytes=_bytes(values.get("memory.used")),
                    memory_total_bytes=_bytes(values.get("memory.total")),
                ),
            )
        )
    return sorted(found, key=lambda card: card.module_id)


def inventory() -> dict[int, CardInventory]:
    """Products of the cards by module id, and how many of their internal ports are up."""
    listed = csv.reader(
        command_output("hl-smi", "-Q", "module_id,bus_id,name", "-f", "csv,noheader").splitlines(),
        skipinitialspace=True,
    )
    cards = [row for row in listed if len(row) == 3 and row[0].strip().isdecimal()]
    with ThreadPoolExecutor(max_workers=8) as threads:
        found = threads.map(lambda row: _inventory(row[1].strip(), row[2].strip()), cards)
        return {int(row[0]): one for row, one in zip(cards, found, strict=True)}


def _inventory(bus_id: str, name: str) -> CardInventory:
    asked = ("hl-smi", "-i", bus_id, "-n")
    return parse_links(name, command_output(*asked, "ports"), command_output(*asked, "link"))


def parse_links(name: str, ports: str, link: str) -> CardInventory:
    """Internal ports in the output of ``-n ports``, and those of them that ``-n link`` says are up.

    The second does not tell internal from external ports, which may be up as well: of more than
    there are internal ones, all of those count as up.
    """
    internal = sum("internal" in line.lower() for line in ports.splitlines())
    if not internal:
        return CardInventory(product=name)
    up = sum(re.search(r"\bup\b", line.lower()) is not None for line in link.splitlines())
    return CardInventory(product=name, links=internal, links_up=min(up, internal))


def parse_power(text: str) -> dict[int, float]:
    """Power of each card in the table of ``hl-smi`` without options, by hl-smi's index."""
    found: dict[int, float] = {}
    index: int | None = None
    for line in text.partition("Compute Processes:")[0].splitlines():
        if named := _NAMED.match(line.strip()):
            index = int(named["index"])
        elif index is not None and (drawn := _DRAWN.search(line)):
            found[index] = float(drawn["watts"])
            index = None
    return found


def parse_processes(text: str) -> dict[int, list[Holder]]:
    """The table "Compute Processes" of ``hl-smi`` without options, by hl-smi's index."""
    _, _, table = text.partition("Compute Processes:")
    found: dict[int, list[Holder]] = {}
    for line in table.splitlines():
        if match := _PROCESS.match(line.strip()):
            holder = Holder(pid=int(match["pid"]), name=match["name"])
            found.setdefault(int(match["index"]), []).append(holder)
    return found


def holders(module_id: int, root: Path = Path("/")) -> list[Holder]:
    """Other processes of this host, or of this container, that have the card's device file open.

    Drivers since 1.13 have one file a card, ``/dev/accel/accelN``, and say the module id of each in
    ``/sys/class/accel/accelN/device/module_id``. Processes of other users are not seen.
    """
    files = {file for file, module in _device_files(root).items() if module == module_id}
    if not files:
        return []
    found = []
    for process in (root / "proc").glob("[0-9]*"):
        pid = int(process.name)
        if pid != os.getpid() and _has_open(process, files):
            try:
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
            except OSError:
                continue  # it has just ended
            found.append(Holder(pid=pid, name=name))
    return sorted(found, key=lambda holder: holder.pid)


def opened_modules(root: Path = Path("/")) -> set[int]:
    """Module ids of the cards whose device files this very process has open; empty also where the
    driver does not tell which file is which card's."""
    opened = set()
    for entry in (root / f"proc/{os.getpid()}/fd").glob("*"):
        with contextlib.suppress(OSError):
            opened.add(os.readlink(entry))
    return {module for file, module in _device_files(root).items() if file in opened}


def _device_files(root: Path) -> dict[str, int]:
    """The module id behind each device file."""
    found = {}
    for entry in sorted((root / "sys/class/accel").glob("accel[0-9]*")):
        with contextlib.suppress(OSError, ValueError):
            module_id = int((entry / "device/module_id").read_text(encoding="ascii"))
            found[f"/dev/accel/{entry.name}"] = module_id
    return found


def _has_open(process: Path, files: set[str]) -> bool:
    try:
        return any(os.readlink(entry) in files for entry in (process / "fd").iterdir())
    except OSError:  # gone, or another user's
        return False


def _figure(text: str | None) -> float | None:
    """The number before a unit: ``672 MiB`` and ``672`` are the same."""
    words = (text or "").split()
    return number(words[0]) if words else None


def _bytes(text: str | None) -> int | None:
    mebibytes = _figure(text)
    return None if mebibytes is None else int(mebibytes * _MIB)
