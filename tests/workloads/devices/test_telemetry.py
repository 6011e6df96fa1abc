"""GPUs, processors and memory watched from outside: recorded output, and files of Linux."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import GIB, MIB, Nvml
from patience import until

from workloads.devices import base, device_class
from workloads.devices.monitor import host, nvidia
from workloads.devices.monitor.host import CardTelemetry, HostMemoryPeak, number_of, resident_bytes

CUDA = device_class("cuda")
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


def test_figures_are_read_with_and_without_units_and_unknown_ones_are_not_zero() -> None:
    assert nvidia.parse_nvidia_smi(WITH_UNITS)[1] == CardTelemetry(
        power_w=871.89, temperature_c=69, utilization_percent=86, memory_used_bytes=7850 * MIB
    )
    sound, unknown = nvidia.parse_nvidia_smi(WITHOUT_UNITS).values()
    assert sound == CardTelemetry(
        power_w=48.99,
        temperature_c=30,
        utilization_percent=0,
        memory_used_bytes=5 * MIB,
        memory_total_bytes=32510 * MIB,
    )
    assert (unknown.power_w, unknown.utilization_percent, unknown.temperature_c) == (None, None, 31)
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
def test_complaints_of_a_tool_are_not_taken_for_figures(text: str) -> None:
    assert nvidia.parse_nvidia_smi(text) == {}


def test_the_tool_is_asked_for_what_is_read(tmp_path, tool, monkeypatch) -> None:
    tool("nvidia-smi", f'echo "$@" > {tmp_path}/asked\ncat <<END\n{WITHOUT_UNITS}END\n')
    monkeypatch.setattr(nvidia, "nvml_telemetry", dict)
    assert CUDA.telemetry()[0].power_w == 48.99
    assert (tmp_path / "asked").read_text().strip() == (
        "--query-gpu=index,power.draw,temperature.gpu,utilization.gpu,memory.used,memory.total "
        "--format=csv,nounits"
    )


def test_the_library_tells_energy_too_in_milliunits(nvml: Nvml) -> None:
    nvml.taken, nvml.reserved = 50 * GIB, 0
    found = nvidia.nvml_telemetry()
    assert found[0] == CardTelemetry(
        power_w=412.5,
        energy_j=123456.789,
        temperature_c=61,
        utilization_percent=97,
        sm_clock_mhz=1440,
        throttled=frozenset({"power cap", "temperature (hardware)"}),
        memory_used_bytes=50 * GIB,
        memory_total_bytes=80 * GIB,
    )
    assert found[1].energy_j is None and found[1].power_w == 412.5


def test_a_lost_gpu_takes_no_other_with_it(nvml: Nvml) -> None:
    nvml.lost = 1
    sound, lost = nvidia.nvml_telemetry().values()
    assert sound.power_w == 412.5 and not sound.lost
    assert lost == CardTelemetry(lost="GPU is lost")
    assert nvidia.nvml_use(1) is None and nvidia.uuid(1) == ""
    assert nvidia.nvml_use(0) is not None and nvml.opened == 1, "the library stays open"


def test_a_library_that_hangs_is_given_up_and_not_called_again(nvml, monkeypatch) -> None:
    monkeypatch.setattr("workloads.devices.base.HUNG_S", 0.1)
    ends, calls = threading.Event(), []

    def hangs() -> int:
        calls.append(1)
        ends.wait(20)
        return 2

    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", hangs)
    assert nvidia.nvml_telemetry() == nvidia.nvml_telemetry() == {}
    assert len(calls) == 1
    ends.set()
    assert until(nvidia.nvml_telemetry, 10), "it answers again"


def test_a_tool_that_hangs_is_given_up_and_not_called_again(tmp_path, tool, monkeypatch) -> None:
    monkeypatch.setattr("workloads.devices.base.HUNG_S", 0.2)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)  # a driver that hangs
    wait = f"while [ ! -e {tmp_path}/end ]; do sleep .05; done"
    tool("nvidia-smi", f"echo >> {tmp_path}/calls\n{wait}\n")
    assert nvidia.nvidia_smi_telemetry() == nvidia.nvidia_smi_telemetry() == {}
    assert until(lambda: calls(tmp_path), 10)
    assert nvidia.nvidia_smi_telemetry() == {} and calls(tmp_path) == 1
    (tmp_path / "end").touch()
    assert until(lambda: nvidia.nvidia_smi_telemetry() == {} and calls(tmp_path) == 2, 10)


def calls(directory: Path) -> int:
    file = directory / "calls"
    return file.read_text().count("\n") if file.exists() else 0


def test_a_tool_that_fails_keeps_what_it_printed(tool: Callable[[str, str], None]) -> None:
    tool("nvidia-smi", f"cat <<END\n{WITHOUT_UNITS}END\necho GPU 2 is odd >&2; exit 15\n")
    assert set(nvidia.nvidia_smi_telemetry()) == {0, 1}
    assert base.version_in(base.command_output("nvidia-smi")) == "0, 48.99, 30, 0, 5, 32510"
    tool("nvidia-smi", "echo NVIDIA-SMI has failed because it could not ...; exit 9\n")
    assert CUDA().driver_version() == ""


def test_a_gpu_on_which_somebody_computes_is_not_free(nvml: Nvml) -> None:
    assert CUDA.occupied(0) is None
    nvml.processes = {os.getpid(): "python", 70: "/usr/bin/nvidia-cuda-mps-server"}
    assert CUDA.occupied(0) is None  # NVIDIA's own broker takes nothing from a job
    nvml.processes |= {900: "/usr/bin/python3", 71: "vllm"}
    assert CUDA.occupied(0) == "card 0 is held by process 71 (vllm), process 900 (python3)"
    assert CUDA.occupied(1) is None  # the driver does not tell: a job says what it runs into


def test_the_library_stays_open_until_it_fails(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> int:
        raise RuntimeError("GPU is lost")

    for _ in range(3):
        nvidia.nvml_telemetry()
    assert nvml.opened == 1
    with monkeypatch.context() as broken:
        broken.setattr(nvml, "nvmlDeviceGetCount", lost)
        assert nvidia.nvml_telemetry() == {}
    assert nvml.opened == 0
    assert len(nvidia.nvml_telemetry()) == 2 and nvml.opened == 1


def test_the_library_has_what_is_called() -> None:
    """The names that the stand-in has are those of the real package."""
    real = pytest.importorskip("pynvml")
    names = [name for name in dir(Nvml) if name.lower().startswith("nvml")]
    assert [name for name in names if not hasattr(real, name)] == []
    assert real.nvmlMemory_v2 == Nvml.nvmlMemory_v2
    nvidia.close_nvml()
    assert isinstance(nvidia.nvml_telemetry(), dict)  # without a driver, no GPU and no error


def zone(root: Path, name: str, kind: str, energy_uj: int) -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "name").write_text(f"{kind}\n")
    (directory / "energy_uj").write_text(f"{energy_uj}\n")
    (directory / "max_energy_range_uj").write_text("1000000\n")
    return directory / "energy_uj"


def test_the_energy_of_all_packages_is_added_up_over_wraps(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 100)
    zone(tmp_path, "intel-rapl:0:0", "core", 5)  # parts of a package are in it already
    zone(tmp_path, "intel-rapl:0:1", "dram", 5)
    energy = host.PackageEnergy(tmp_path)
    assert energy.read() == 0.0
    second.write_text("200100\n")
    assert energy.read() == pytest.approx(0.2)
    first.write_text("50000\n")  # wrapped: 100,000 to the end and 50,000 more
    assert energy.read() == pytest.approx(0.35)
    second.unlink()  # one of two packages is half of the truth
    assert energy.read() is None
    assert host.PackageEnergy(tmp_path / "none").read() is None


BLOCK = 80_000_000


def touch(seen: Callable[[], object]) -> None:
    """Use new pages until they were seen: the heap could give some that are resident already."""
    with mmap.mmap(-1, BLOCK) as block:
        for page in range(0, BLOCK, mmap.PAGESIZE):
            block[page] = 1
        until(seen, 10)


@pytest.mark.parametrize("permitted", [True, False], ids=["high-water mark", "sampling"])
def test_a_peak_is_seen_and_forgotten(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not permitted:
        monkeypatch.setattr(host, "reset_high_water", lambda: False)
    before = resident_bytes()
    with HostMemoryPeak() as first:
        touch(lambda: first.method == "VmHWM" or first.bytes - before > 0.8 * BLOCK)
    assert first.method in ("VmHWM", "sampled")
    if not permitted:
        assert first.method == "sampled"
    assert first.bytes - before > 0.8 * BLOCK
    with HostMemoryPeak() as second:
        pass
    assert second.bytes < first.bytes - 0.5 * BLOCK


def test_sampling_is_over_when_the_peak_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a reading that began before could be kept in the place of the last one."""
    began, over = threading.Event(), threading.Event()

    def slowly() -> int:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            time.sleep(0.1)
            over.set()
        return 1

    monkeypatch.setattr(host, "reset_high_water", lambda: False)
    monkeypatch.setattr(host, "resident_bytes", slowly)
    with HostMemoryPeak():
        began.wait()
    assert over.is_set()
