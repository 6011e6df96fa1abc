"""The moment at which a card is free: decided by what was recorded on real cards, and by laws."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import GIB, MIB
from hypothesis import given
from hypothesis import strategies as st
from recorded_hl_smi import GAUDI3_CSV

from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import FailureClass, classify
from orchestrator.core.topology import Card
from orchestrator.on_ray import agent
from orchestrator.worker import worker as acquisition
from orchestrator.worker.protocol import WorkerConfig
from orchestrator.worker.worker import CardWorker
from workloads.base import CardNotAcquired
from workloads.devices.cuda import CudaDevice
from workloads.devices.hpu import HpuDevice
from workloads.devices.monitor import gaudi, nvidia
from workloads.devices.monitor.host import (
    SLACK_BYTES,
    CardUse,
    Holder,
    ReleaseWait,
    idle_memory_bytes,
    occupation,
)

PYTHON = Holder(pid=900, name="python3")


def in_use(mib: int | None, **changes: Any) -> CardUse:
    """A card with so much memory in use and no process listed, as in some virtual machines."""
    return CardUse(**{"used_bytes": None if mib is None else mib * MIB, **changes})


@pytest.mark.parametrize(
    ("use", "idle_mib", "expected"),
    [
        # What the vendor's tools list is believed, whatever the memory is.
        (in_use(4, holders=(PYTHON,)), 4, "card 3 is held by process 900 (python3)"),
        (in_use(None, holders=(PYTHON,)), None, "card 3 is held by process 900 (python3)"),
        # An H100: 525 MiB in use when idle, all of it the driver's; a bare context takes 520 more.
        (in_use(525, reserved_bytes=520 * MIB), 5, None),
        (in_use(1045, reserved_bytes=520 * MIB), 5, "525 MiB in use (5 when it was idle)"),
        (in_use(525), 525, None),  # nvidia-smi or NVML's first version: not told apart
        (in_use(1045), 525, "1045 MiB in use (525 when it was idle)"),
        (in_use(81559, reserved_bytes=520 * MIB), 5, "81039 MiB in use (5 when it was idle)"),
        # Nobody has seen it idle: what no idle card has.
        (in_use(768), None, None),
        (in_use(1536), None, None),
        (in_use(27098), None, "27098 MiB in use (an idle one less than 1536)"),
        # It draws pictures as well: its memory says something only beside what it was.
        (in_use(3000, display=True), None, None),
        (in_use(3000, display=True), 2900, None),
        (in_use(9000, display=True), 2900, "9000 MiB in use (2900 when it was idle)"),
        (in_use(None), 5, None),  # nobody can tell
    ],
)
def test_a_card_is_free_by_its_processes_and_its_memory(use, idle_mib, expected) -> None:
    found = occupation(3, use, None if idle_mib is None else idle_mib * MIB)
    assert found is None if expected is None else expected in (found or "")


@pytest.mark.parametrize(
    ("use", "idle_mib"),
    [
        (in_use(525, reserved_bytes=520 * MIB), 5),
        (in_use(3000, display=True), 3000),
        (in_use(27098), None),  # somebody has it, listed or not
        (in_use(768, holders=(PYTHON,)), None),
        (in_use(None), None),
    ],
)
def test_only_an_idle_card_tells_what_an_idle_card_has(use: CardUse, idle_mib: int | None) -> None:
    """A server that holds 27 GB when the run begins is not how the card looks when it is free."""
    assert idle_memory_bytes(use) == (None if idle_mib is None else idle_mib * MIB)


@given(
    used=st.integers(0, 192 * GIB),
    reserved=st.integers(0, 192 * GIB),
    taken=st.integers(SLACK_BYTES + 1, 192 * GIB),
)
def test_a_card_is_free_as_it_was_when_idle_and_not_with_a_process_more(used, reserved, taken):
    use = CardUse(used_bytes=used, reserved_bytes=reserved)
    idle = idle_memory_bytes(use)
    if idle is not None:
        assert occupation(0, use, idle) is None
        busy = CardUse(used_bytes=max(used, reserved) + taken, reserved_bytes=reserved)
        assert occupation(0, busy, idle) is not None


def waited(readings: list[int], every_s: float = 1.0, **changes: Any) -> tuple[float, str | None]:
    """The wait of a worker that sees these MiB one after the other, the last for ever; and why
    it gives up, if it does."""
    waiting = ReleaseWait(card_index=0, idle_bytes=5 * MIB, **changes)
    now = 1000.0
    for number in range(10_000):
        mib = readings[min(number, len(readings) - 1)]
        reason = waiting.reason(now, in_use(mib))
        if reason is None:
            return now - 1000.0, None
        if waiting.is_over(now):
            return now - 1000.0, f"{waiting.duration(now)}: {reason}"
        now += every_s
    raise AssertionError("waited for ever")


@pytest.mark.parametrize(
    ("readings", "seconds", "reason"),
    [
        # 80 GB in 80 s: more than twice the patience with what is held.
        ([*range(80_000, 0, -1000), 5], 80.0, None),
        ([40_000], 30.0, "after 30 s: card 0 has 40000 MiB in use (5 when it was idle) by a "),
        ([80_000, 60_000, 40_000], 32.0, "fell from 80000 to 40000 MiB: card 0 has 40000 MiB"),
        (list(range(200_000, 0, -20)), 300.0, ""),  # the longest wait
    ],
    ids=["falls", "is held", "is held after a while", "falls for ever"],
)
def test_memory_that_falls_is_waited_for_and_what_is_held_is_named(readings, seconds, reason):
    waited_s, why = waited(readings)
    assert waited_s == seconds
    assert why is None if reason is None else reason in (why or "")


@given(
    readings=st.lists(st.integers(0, 80_000), min_size=1, max_size=60), every_s=st.floats(0.1, 9)
)
def test_a_wait_ends_in_time_and_never_with_a_card_that_is_taken(readings, every_s) -> None:
    seconds, why = waited(readings, every_s)
    assert seconds <= 300 + every_s
    if why is None:
        number = min(round(seconds / every_s), len(readings) - 1)
        assert occupation(0, in_use(readings[number]), 5 * MIB) is None


def test_a_gaudi_job_that_nobody_lists_is_known_by_its_memory(tool) -> None:
    """The smallest job on record, 3,219 MiB, from within another container."""
    text = GAUDI3_CSV.replace("130400 MiB, 672 MiB", "127853 MiB, 3219 MiB", 1)
    tool("hl-smi", f'[ -z "$*" ] || cat <<END\n{text}END\n')
    uses = {module: gaudi.hl_smi_use(module) for module in range(8)}
    assert idle_memory_bytes(uses[0]) == 672 * MIB
    found = [occupation(module, use, 672 * MIB) for module, use in uses.items()]
    assert [why for why in found if why] and all(
        "3219 MiB in use (672 when it was idle)" in why for why in found if why
    )


def test_a_process_with_another_gaudi_card_open_has_not_got_its_own(tmp_path, monkeypatch) -> None:
    for number, module_id in ((1, 4), (2, 5)):
        device = tmp_path / f"sys/class/accel/accel{number}/device"
        device.mkdir(parents=True)
        (device / "module_id").write_text(f"{module_id}\n")
    files = tmp_path / f"proc/{os.getpid()}/fd"
    files.mkdir(parents=True)
    assert gaudi.opened_modules(tmp_path) == set()
    (files / "17").symlink_to("/dev/accel/accel2")
    opened = gaudi.opened_modules(tmp_path)
    assert opened == {5}
    monkeypatch.setattr(gaudi, "opened_modules", lambda: opened)
    assert HpuDevice().mismatch(5) is None
    assert HpuDevice().mismatch(4) == (
        "it has the cards with the module ids 5 open and was given 4"
    )


@pytest.mark.parametrize("second_version", [True, False])
def test_a_gpu_in_a_machine_that_lists_no_process_is_known_by_its_memory(nvml, second_version):
    nvml.second_version = second_version
    idle = agent.idle_memory_of(Accelerator("GPU"), ("0", "MIG-8d"))
    assert idle == {0: (5 if second_version else 525) * MIB}
    assert CudaDevice.occupied(0, idle[0]) is None
    nvml.taken = 600 * MIB
    found = CudaDevice.occupied(0, idle[0])
    assert found is not None and "MiB in use" in found and "not seen from here" in found


def test_without_nvml_a_gpu_is_known_by_the_tool(monkeypatch, tool) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvidia.close_nvml()
    tool("nvidia-smi", "printf 'index, memory.used [MiB]\\n0, 41000\\n1, 4\\n'\n")
    assert "41000 MiB in use" in (CudaDevice.occupied(0) or "")
    assert CudaDevice.occupied(1) is None
    assert CudaDevice.occupied(2) is None  # no such GPU: the job says what it runs into
    monkeypatch.setenv("PATH", "")
    assert CudaDevice.occupied(0) is None  # nor the tool


GPU = Card(node_id="n", index=0, accelerator=Accelerator.GPU)


def worker(monkeypatch: pytest.MonkeyPatch, seen: list[float], then: Any) -> CardWorker:
    """A worker for a GPU, whose clock goes on by its own waits; ``then`` is done after each."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        seen.append(now[0])
        then()

    monkeypatch.setattr(acquisition, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return CardWorker(
        WorkerConfig(
            worker_id="w", card=GPU, node_name="gpu-1", emulated=False, idle_memory_bytes=5 * MIB
        )
    )


def test_a_worker_after_a_killed_one_takes_its_card_when_the_memory_is_free(nvml, monkeypatch):
    """The process is gone and no list ever had it; 70 GB go in half a second each 10."""
    nvml.taken = 70 * GIB

    def fall() -> None:
        nvml.taken = max(5 * MIB, nvml.taken - 10 * GIB)

    seen: list[float] = []
    worker(monkeypatch, seen, fall).wait_until_free(CudaDevice())
    assert nvml.taken == 5 * MIB and len(seen) == 7


def test_a_worker_does_not_take_a_card_whose_memory_is_never_free(nvml, monkeypatch) -> None:
    nvml.taken = 30 * GIB
    with pytest.raises(CardNotAcquired, match=r"GPU0 is not free after 30 s: .* 30720 MiB") as why:
        worker(monkeypatch, [], lambda: None).wait_until_free(CudaDevice())
    assert classify(why.value) is FailureClass.ACQUIRE


UUID = "8dcb4b4c-0000-1111-2222-333344445555"


@pytest.mark.parametrize(
    ("count", "uuid", "expected"),
    [
        (1, UUID, None),
        (1, None, None),  # an older torch
        (1, "MIG-1", None),
        (8, UUID, "it sees 8 GPUs and was given one"),
        (0, None, "it sees 0 GPUs and was given one"),
        (1, "ffffffff-0000", "UUID ffffffff-0000 and was given 8dcb4b4c"),
    ],
)
@pytest.mark.usefixtures("nvml")
def test_what_torch_sees_is_compared_with_the_card_of_that_index(
    count, uuid, expected, monkeypatch
) -> None:
    torch = pytest.importorskip("torch")
    seen = SimpleNamespace() if uuid is None else SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    found = CudaDevice().mismatch(0)
    assert found is None if expected is None else expected in (found or "")
