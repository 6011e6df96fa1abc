"""GPUs and processors watched from outside: recorded output, and files as Linux has them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workloads.devices import device_class
from workloads.devices.monitor import host, nvidia
from workloads.devices.monitor.host import CardTelemetry, number_of

MIB = 2**20
#: With units, as eight-GPU servers print it; of a V100 server, with ``nounits``; and of a GPU whose
#: board has no power sensor.
WITH_UNITS = """\
index, utilization.gpu [%], memory.used [MiB], power.draw [W], temperature.gpu
0, 86 %, 7850 MiB, 863.87 W, 70
1, 86 %, 7850 MiB, 871.89 W, 69
"""
WITHOUT_UNITS = """\
index, power.draw [W], temperature.gpu, utilization.gpu [%], memory.used [MiB], memory.total [MiB]
0, 48.99, 30, 0, 5, 32510
1, [N/A], 31, [Not Supported], 6, 32510
"""


def test_figures_are_read_with_and_without_units() -> None:
    assert nvidia.parse_nvidia_smi(WITH_UNITS)[1] == CardTelemetry(
        power_w=871.89, temperature_c=69, utilization_percent=86, memory_used_bytes=7850 * MIB
    )
    assert nvidia.parse_nvidia_smi(WITHOUT_UNITS)[0] == CardTelemetry(
        power_w=48.99,
        temperature_c=30,
        utilization_percent=0,
        memory_used_bytes=5 * MIB,
        memory_total_bytes=32510 * MIB,
    )


def test_what_a_gpu_does_not_tell_stays_unknown() -> None:
    found = nvidia.parse_nvidia_smi(WITHOUT_UNITS)[1]
    assert (found.power_w, found.utilization_percent, found.temperature_c) == (None, None, 31)
    assert [number_of(text) for text in ("nan", "inf", "N/A", "", " 3.5 ")] == [None] * 4 + [3.5]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "No devices were found\n",
        "index, power.draw [W]\n",
        "index\n[N/A]\n",
    ],
)
def test_a_tool_that_fails_tells_of_no_gpu(text: str) -> None:
    assert nvidia.parse_nvidia_smi(text) == {}


def test_the_tool_is_asked_for_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat <<END\n{WITHOUT_UNITS}END\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(nvidia, "nvml_telemetry", dict)
    assert device_class("cuda").telemetry()[0].power_w == 48.99
    asked = (tmp_path / "asked").read_text().strip()
    assert asked == (
        "--query-gpu=index,power.draw,temperature.gpu,utilization.gpu,memory.used,memory.total "
        "--format=csv,nounits"
    )


class FakeNvml:
    """NVML's functions by the names and units of ``nvidia-ml-py``; GPU 1 has no energy counter."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.open = 0
        self.used = 0
        self.processes: dict[int, str] = {}

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 412_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle == 1:
            raise RuntimeError("Not Supported")
        return 123_456_789

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return {1: 1440}[kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x1 | 0x4 | 0x40  # a package that has the older name alone

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self.used, total=141 * 2**30, free=141 * 2**30 - self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        if handle == 1:
            raise RuntimeError("Insufficient Permissions")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.processes]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return self.processes[pid]


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """The stand-in, as if it were installed."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    nvidia.close_nvml()
    return fake


def test_the_library_tells_energy_too_in_milliunits(fake_nvml: FakeNvml) -> None:
    fake_nvml.used = 80 * 2**30
    found = nvidia.nvml_telemetry()
    assert found[0] == CardTelemetry(
        power_w=412.5,
        energy_j=123456.789,
        temperature_c=61,
        utilization_percent=97,
        sm_clock_mhz=1440,
        throttled=frozenset({"power cap", "temperature (hardware)"}),
        memory_used_bytes=80 * 2**30,
        memory_total_bytes=141 * 2**30,
    )
    assert found[1].energy_j is None and found[1].power_w == 412.5


def test_a_gpu_on_which_somebody_computes_is_not_free(fake_nvml: FakeNvml) -> None:
    cuda = device_class("cuda")
    assert cuda.occupied(0) is None
    fake_nvml.processes = {os.getpid(): "python", 70: "/usr/bin/nvidia-cuda-mps-server"}
    assert cuda.occupied(0) is None
    fake_nvml.processes |= {900: "/usr/bin/python3", 71: "vllm"}
    assert cuda.occupied(0) == "card 0 is held by process 71 (vllm), process 900 (python3)"


def test_where_nobody_can_tell_a_gpu_counts_as_free(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver does not tell, or there is no package: a job tries, and says what it ran into."""
    fake_nvml.processes = {900: "python"}
    assert device_class("cuda").occupied(1) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvidia.close_nvml()
    assert device_class("cuda").occupied(0) is None


def test_the_library_stays_open_until_it_fails(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        nvidia.nvml_telemetry()
    assert fake_nvml.open == 1

    def lost() -> int:
        raise RuntimeError("GPU is lost")

    with monkeypatch.context() as broken:
        broken.setattr(fake_nvml, "nvmlDeviceGetCount", lost)
        assert nvidia.nvml_telemetry() == {}
    assert fake_nvml.open == 0
    assert len(nvidia.nvml_telemetry()) == 2 and fake_nvml.open == 1


def test_the_library_has_what_is_called() -> None:
    real = pytest.importorskip("pynvml")
    names = [name for name in dir(FakeNvml) if name.lower().startswith("nvml")]
    assert [name for name in names if not hasattr(real, name)] == []
    assert isinstance(nvidia.nvml_telemetry(), dict)


def zone(root: Path, name: str, kind: str, energy_uj: int, most_uj: int = 1_000_000) -> Path:
    """One zone as the kernel shows it."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "name").write_text(f"{kind}\n")
    (directory / "energy_uj").write_text(f"{energy_uj}\n")
    (directory / "max_energy_range_uj").write_text(f"{most_uj}\n")
    return directory


def test_the_energy_of_all_packages_is_added_up_over_wraps(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 100)
    zone(tmp_path, "intel-rapl:0:0", "core", 5)
    zone(tmp_path, "intel-rapl:0:1", "dram", 5)
    energy = host.PackageEnergy(tmp_path)
    assert energy.read() == 0.0
    (second / "energy_uj").write_text("200100\n")
    assert energy.read() == pytest.approx(0.2)
    (first / "energy_uj").write_text("50000\n")  # wrapped: 100,000 to the end and 50,000 more
    assert energy.read() == pytest.approx(0.35)


def test_a_package_that_cannot_be_read_leaves_the_whole_unknown(tmp_path: Path) -> None:
    assert host.PackageEnergy(tmp_path / "none").read() is None
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    broken = zone(tmp_path, "intel-rapl:1", "package-1", 1)
    (broken / "energy_uj").unlink()
    assert host.PackageEnergy(tmp_path).read() is None
