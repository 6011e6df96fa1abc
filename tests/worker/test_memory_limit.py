"""An emulated card's memory really runs out, as an exception and not as a death."""

import errno
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import patience

from orchestrator.core.outcome import FailureClass
from orchestrator.worker.memory_limit import MemoryLimit, memory_kills
from orchestrator.worker.worker import describe
from workloads.devices import device_for

PROGRAM = """
import json, os, sys
from threading import Event, Thread
import torch
from orchestrator.worker.memory_limit import MemoryLimit
from orchestrator.worker.worker import describe
from workloads.devices import device_for
torch.set_num_threads(1)

def fill(make):
    kept = []
    while True:
        kept.append(make())

for name, body in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        torch.ones(64, 64) @ torch.ones(64, 64)
        limit = MemoryLimit.above_baseline(50_000_000)
        print("case", name)
        exec(body)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
EXHAUST = """
try:
    with limit.in_force():
        fill(lambda: {make})
except (RuntimeError, MemoryError) as error:
    failure = describe(error, device=device_for("cpu"), memory_bytes=50_000_000, node_name="n")
    print(failure.failure_class, len(torch.ones(25_000_000)))
"""
FITS = """
for _ in range(3):
    with limit.in_force():
        print(torch.ones(11_250_000).sum().item())
"""
THREAD = "Thread(target=Event().wait, daemon=True).start()"
MAKES = ["torch.ones(1_000_000)", "torch.ones(1000)", "bytearray(100)", "torch.ones(10**9)", THREAD]


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    cases = {make: EXHAUST.format(make=make) for make in MAKES} | {"fits": FITS}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    _, *parts = done.stdout.split("case ")
    return {name: words.split() for name, _, words in (part.partition("\n") for part in parts)}


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES)
def test_exhausting_the_limit_raises_and_the_process_lives_on(
    make: str, printed: dict[str, list[str]]
) -> None:
    assert printed[make] == ["out_of_memory", "25000000"]


@pytest.mark.slow
def test_what_fits_is_not_refused(printed: dict[str, list[str]]) -> None:
    assert printed["fits"] == ["11250000.0"] * 3


# ---------------------------------------------------------------- refusals of memory

LIBRARY = "tokenizers.abi3.so: failed to map segment from shared object"
REFUSALS = [
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a primitive"),
    RuntimeError("could not create a memory object"),
    RuntimeError("[enforce fail a"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError(LIBRARY),
    MemoryError(),
]


@pytest.mark.parametrize("error", REFUSALS, ids=str)
def test_refused_memory_is_out_of_memory_on_a_card_with_a_limit(error: Exception) -> None:
    failure = describe(error, device=device_for("cpu"), memory_bytes=1000, node_name="n")
    assert failure.failure_class is FailureClass.OUT_OF_MEMORY
    assert "emulated card's 1,000 bytes" in failure.message


@pytest.mark.parametrize(
    ("error", "limit", "failure_class"),
    [
        (RuntimeError("could not create a primitive descriptor for a matmul"), 1000, "error"),
        (RuntimeError("[enforce fail at tensor.h:91] wrong type"), 1000, "error"),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), 1000, "error"),
        (OSError(errno.EACCES, "Permission denied"), 1000, "error"),
        # Only where we limit memory do these words mean that.
        (RuntimeError("could not create a primitive"), None, "error"),
        (ImportError(LIBRARY), None, "import"),
    ],
)
def test_other_errors_are_not_taken_for_it(
    error: Exception, limit: int | None, failure_class: str
) -> None:
    failure = describe(error, device=device_for("cpu"), memory_bytes=limit, node_name="n")
    assert failure.failure_class == failure_class


class _Tensor:
    """Stands for something large that a frame holds."""


def _fail(kept: list[weakref.ref[_Tensor]]) -> None:
    tensor = _Tensor()
    kept.append(weakref.ref(tensor))
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise RuntimeError("outer") from error


def test_the_frames_of_an_error_and_of_its_causes_are_let_go() -> None:
    kept: list[weakref.ref[_Tensor]] = []
    try:
        _fail(kept)
    except RuntimeError as error:
        failure = describe(error, device=None, memory_bytes=None, node_name="n")
        gc.collect()
        assert kept[0]() is None
    assert "KeyError: 'inner'" in failure.tail and "RuntimeError: outer" in failure.tail


# ---------------------------------------------------------------- the kernel's counts of kills


def host(root: Path, group: str, counts: dict[str, int]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for name, count in counts.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"nr_free_pages 5\noom_kill_disable 0\noom 77\noom_kill {count}\n")
    return root


MACHINE = {"proc/vmstat": 9}
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("group", "counts", "kills"),
    [
        ("0::/user/night\n", {f"{V2}/user/night/memory.events": 3, f"{V2}/memory.events": 4}, 3),
        ("0::/\n", {f"{V2}/memory.events": 4}, 4),  # a container that sees its own group alone
        ("4:memory:/a\n", {f"{V1}/a/memory.oom_control": 2, f"{V1}/memory.oom_control": 4}, 2),
        ("7:cpu,memory:/docker/x\n0::/\n", {f"{V1}/memory.oom_control": 1}, 1),
        ("5:cpu:/a\n0::/\n", {f"{V1}/a/memory.oom_control": 2}, 9),  # not told for its group
        ("", {}, 9),
        ("garbage\n::\n", {}, 9),
    ],
)
def test_the_count_of_the_own_group_goes_before_that_of_the_machine(
    tmp_path: Path, group: str, counts: dict[str, int], kills: int
) -> None:
    assert memory_kills(host(tmp_path, group, MACHINE | counts)) == kills


def test_a_machine_that_tells_nothing_has_no_kills(tmp_path: Path) -> None:
    assert memory_kills(tmp_path) == 0


def test_what_the_process_holds_is_read_where_statm_has_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in gVisor: a limit that counted what was there before would fail every job."""
    monkeypatch.setattr("psutil.Process.memory_info", lambda _: SimpleNamespace(data=0))
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=lambda *_: 1))
    assert MemoryLimit.above_baseline(1).baseline_bytes > 2**20
