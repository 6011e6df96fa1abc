"""Readings of Gaudi cards from outside: recorded outputs of hl-smi, and the real pyhlml."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded_hl_smi import GAUDI2_TABLE, GAUDI3_CSV, GAUDI_CSV, GAUDI_TABLE

from orchestrator.core.readings import card_readings
from workloads.devices import CardFacts
from workloads.devices.hpu import HpuDevice
from workloads.devices.monitor import gaudi
from workloads.devices.monitor.gaudi import fp8_scales, product_of
from workloads.devices.monitor.host import CardTelemetry, Holder

MIB = 2**20


def test_cards_are_known_by_their_module_ids_and_missing_columns_stay_unknown() -> None:
    """The driver's order, ``index``, is another; a query with fewer fields, and with units."""
    cards = gaudi.parse_cards(GAUDI3_CSV)
    assert [card.module_id for card in cards] == list(range(8))
    assert [card.index for card in cards] == [4, 0, 2, 1, 7, 6, 3, 5]
    assert {card.name for card in cards} == {"HL-325L"}
    expected = CardTelemetry(memory_used_bytes=672 * MIB, memory_total_bytes=131072 * MIB)
    assert cards[0].telemetry == expected


def test_values_without_units_keep_units_in_their_headers() -> None:
    lines = GAUDI_CSV.splitlines()
    rows = [f"{i}, {7 - i}, {row}" for i, row in enumerate(lines[1:])]
    text = "\n".join([f"index, module_id, {lines[0]}", *rows])
    found = {card.module_id: card.telemetry for card in gaudi.parse_cards(text)}
    assert found[7] == CardTelemetry(
        power_w=102,
        power_of=gaudi.RAIL_POWER,
        temperature_c=29,
        utilization_percent=14,
        memory_used_bytes=512 * MIB,
        memory_total_bytes=32768 * MIB,
    )
    assert [found[module].power_w for module in (4, 5, 6, 7)] == [96, 103, 103, 102]


@pytest.mark.parametrize(
    ("text", "telemetry"),
    [
        *((text, []) for text in ("", "Failed to initialize HLML\n", "index, module_id\n")),
        ("index, module_id\nN/A, N/A\n", []),
        # Not zero: an unknown power must not look like a card that takes none.
        ("index, module_id, power.draw [W]\n0, 3, N/A\n", [CardTelemetry()]),
    ],
)
def test_what_is_not_printed_stays_unknown(text: str, telemetry: list[CardTelemetry]) -> None:
    assert [card.telemetry for card in gaudi.parse_cards(text)] == telemetry


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (GAUDI2_TABLE, {6: [Holder(pid=618796, name="ray::ServeRepli")]}),
        (
            GAUDI_TABLE,
            {
                0: [Holder(pid=10, name="python name")],
                6: [Holder(pid=20, name="custom process")],
            },
        ),
        ("", {}),
    ],
)
def test_processes_are_read_from_the_table(table: str, expected: dict[int, list[Holder]]) -> None:
    assert gaudi.parse_processes(table) == expected


def test_the_device_file_of_a_module_tells_who_has_it_open(tmp_path: Path) -> None:
    for number, module_id in ((1, 4), (2, 5)):
        device = tmp_path / f"sys/class/accel/accel{number}/device"
        device.mkdir(parents=True)
        (device / "module_id").write_text(f"{module_id}\n", encoding="ascii")
    (tmp_path / "sys/class/accel/accel_controlD2").mkdir()
    opened = {
        31: "/dev/accel/accel2",
        32: "/dev/accel/accel1",
        33: "/dev/accel/accel_controlD2",
        os.getpid(): "/dev/accel/accel2",
    }
    for pid, file in opened.items():
        (tmp_path / f"proc/{pid}/fd").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/comm").write_text("python3\n", encoding="ascii")
        (tmp_path / f"proc/{pid}/fd/17").symlink_to(file)
    assert gaudi.holders(5, tmp_path) == [Holder(pid=31, name="python3")]
    assert gaudi.holders(0, tmp_path) == []


def test_without_gaudi_cards_nothing_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert HpuDevice.telemetry() == {}
    assert HpuDevice.occupied(0) is None


def test_the_tool_is_asked_for_what_is_read(tool: Callable[[str, str], None]) -> None:
    wanted = " ".join(gaudi.COMMAND[1:])
    tool(
        "hl-smi",
        f'if [ "$*" = "{wanted}" ]; then cat <<END\n{GAUDI3_CSV}END\n'
        f'elif [ -z "$*" ]; then cat <<END\n{GAUDI2_TABLE}END\nelse exit 1; fi\n',
    )
    assert sorted(HpuDevice.telemetry()) == list(range(8))
    assert HpuDevice.occupied(0) is None  # index 4
    assert HpuDevice.occupied(5) == "card 5 is held by process 618796 (ray::ServeRepli)"  # index 6


def test_power_is_that_of_both_rails_where_the_table_has_it(tool) -> None:
    rows = "\n".join(f"{index}, {7 - index}, HL-225, 1.24, 60, 0, 0, 768, 9830" for index in (0, 1))
    tool(
        "hl-smi",
        f'if [ -z "$*" ]; then cat <<END\n{GAUDI2_TABLE}END\n'
        f"else cat <<END\n{gaudi.QUERY}\n{rows}\nEND\nfi\n",
    )
    readings = gaudi.hl_smi_telemetry()
    both, one = readings[7], readings[6]
    assert (both.power_w, both.power_of) == (82.0, gaudi.WHOLE_POWER)
    assert (one.power_w, one.power_of) == (60.0, gaudi.RAIL_POWER)
    power_of = card_readings([(1.0, both), (2.0, one)], 0.0, 3.0)["power_of"]
    assert "54 V rail alone" in power_of and "54 V and 12 V" in power_of


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """pyhlml's functions over the figures of one idle Gaudi2 (the first of ``GAUDI2_TABLE``) and of
    a busy one (its seventh); the energies are made up, and one is not supported."""
    pyhlml = pytest.importorskip("pyhlml")
    cards = [
        SimpleNamespace(module=4, mw=82_000, mj=5_000_000, busy=0, used=768 * MIB),
        SimpleNamespace(module=0, mw=101_000, mj=None, busy=3, used=27098 * MIB),
    ]
    opened: list[int] = []
    functions: dict[str, Callable[..., Any]] = {
        "Init": lambda: opened.append(1),
        "Shutdown": opened.pop,
        "DeviceGetCount": lambda: len(cards),
        "DeviceGetHandleByIndex": cards.__getitem__,
        "DeviceGetModuleID": lambda card: card.module,
        "DeviceGetPowerUsage": lambda card: card.mw,
        "DeviceGetTotalEnergyConsumption": lambda card: card.mj,
        "DeviceGetTemperature": lambda card, sensor: {0: 26}[int(sensor)],  # on the chip
        "DeviceGetClockInfo": lambda card, kind: {2: 1650}[int(kind)],
        "DeviceGetUtilizationRates": lambda card: SimpleNamespace(aip=card.busy),
        "DeviceGetMemoryInfo": lambda card: SimpleNamespace(total=98304 * MIB, used=card.used),
        "DeviceGetCurrentClocksThrottleReasons": lambda card: card.busy,  # bits of both, or none
    }
    for name, function in functions.items():
        monkeypatch.setattr(pyhlml, f"hlml{name}", function)
    yield cards
    assert not opened, "the library was not shut down"


@pytest.mark.usefixtures("library")
def test_hlml_tells_energy_in_joules_and_power_in_watts() -> None:
    readings = gaudi.hlml_telemetry()
    assert readings[4] == CardTelemetry(
        power_w=82.0,
        power_of="HLML, hlmlDeviceGetPowerUsage",
        energy_j=5000.0,
        temperature_c=26,
        utilization_percent=0.0,
        sm_clock_mhz=1650.0,
        throttled=frozenset(),
        memory_used_bytes=768 * MIB,
        memory_total_bytes=98304 * MIB,
    )
    assert readings[0].throttled == {"power cap", "temperature (hardware)"}
    assert readings[0].energy_j is None  # the driver does not support it
    assert readings[0].power_w == 101.0


def test_a_lost_card_takes_no_other_with_it(library, tmp_path: Path) -> None:
    """pyhlml no longer says its module id; its device file says that it belongs here."""
    library[1].module = None
    readings = gaudi.hlml_telemetry()
    assert set(readings) == {4}
    for number, module in enumerate((4, 0, 7)):
        accel = tmp_path / f"sys/class/accel/accel{number}/device"
        accel.mkdir(parents=True)
        (accel / "module_id").write_text(f"{module}\n")
        if module != 7:  # which another container has
            (tmp_path / "dev/accel").mkdir(parents=True, exist_ok=True)
            (tmp_path / f"dev/accel/accel{number}").touch()
    readings = gaudi.with_lost(readings, tmp_path)
    assert set(readings) == {0, 4} and not readings[4].lost
    assert "hl-smi does not list it" in readings[0].lost


@pytest.mark.parametrize("name", ["Init", "DeviceGetCount", "DeviceGetModuleID"])
@pytest.mark.usefixtures("library")
def test_cards_that_cannot_be_counted_are_none(name: str, monkeypatch) -> None:
    monkeypatch.setattr(f"pyhlml.hlml{name}", lambda *_: 1 / 0)
    assert gaudi.hlml_telemetry() == {}


def test_a_missing_library_is_silent_and_what_others_print_is_not(capsys, monkeypatch) -> None:
    """pyhlml prints when it finds none; another thread may print meanwhile."""
    pytest.importorskip("pyhlml")

    def missing(path: str) -> None:
        thread = threading.Thread(target=print, args=("of another thread",))
        thread.start()
        thread.join()
        raise OSError(f"no {path}")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gaudi.hlml_telemetry() == {}
    assert capsys.readouterr().out == "of another thread\n"


@pytest.mark.parametrize(
    ("up", "expected"), [(21, (21, 21)), (24, (21, 21)), (18, (21, 18)), (0, (21, 0))]
)
def test_internal_ports_that_are_up_are_counted(up: int, expected: tuple[int, int]) -> None:
    """Counted as administrators' scripts do: lines with "internal" of one query, "UP" of the
    other, where external ports may be up as well."""
    ports = "".join(f"port {n}: {'external' if n > 20 else 'internal'}\n" for n in range(24))
    link = "".join(f"port {n}: {'UP' if n < up else 'DOWN'}\n" for n in range(24))
    assert gaudi.parse_links(ports, link) == expected
    assert gaudi.parse_links("", link) == (None, None)


def test_the_inventory_asks_each_card_by_its_bus(tool, tmp_path, monkeypatch) -> None:
    tool(
        "hl-smi",
        'case "$*" in\n'
        '"-Q module_id,bus_id,name -f csv,noheader") echo "5, 0000:b3:00.0, HL-325L";;\n'
        '"-i 0000:b3:00.0 -n ports") printf "0 internal\\n1 internal\\n2 external\\n";;\n'
        '"-i 0000:b3:00.0 -n link") printf "port 0: UP\\nport 1: DOWN\\nport 2: DOWN\\n";;\n'
        "*) exit 1;;\nesac\n",
    )
    inventory = {5: CardFacts(index=5, product="HL-325L", links=2, links_up=1)}
    assert gaudi.hl_smi_inventory() == inventory
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert gaudi.hl_smi_inventory() == {}


def test_both_generations_are_declared() -> None:
    for name, product in (("Intel-GAUDI2", "Gaudi2"), ("HL-325L", "Gaudi3"), ("HL-205", None)):
        assert getattr(product_of(name), "name", None) == product
    assert fp8_scales("GAUDI2").startswith("exponent biases 3, 7, 11, 15 ")
    assert fp8_scales("HL-325L").startswith("exponent biases 0 to 63 ")
    assert fp8_scales("HL-205") == ""
