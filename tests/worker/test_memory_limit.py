"""An emulated card's memory really runs out, as an exception and not as a death.

Each case runs in a process of its own, since a limit acts on the whole process: a fork, as the
workers of emulated cards are, of one that has imported torch.
"""

import json
import subprocess
import sys

import pytest
from patience import patience

from orchestrator.core.outcome import FailureClass
from orchestrator.worker.worker import describe

PROGRAM = """
import json, os, sys
from threading import Event, Thread
import torch
from orchestrator.worker.worker import describe
from orchestrator.worker.memory_limit import MemoryLimit
from workloads.devices import device_for
torch.set_num_threads(1)

def fill(make):
    kept = []
    while True:
        kept.append(make())

for name, body in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        torch.ones(64, 64) @ torch.ones(64, 64)
        limit = MemoryLimit.above_baseline(100_000_000)
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
    failure = describe(error, device=device_for("cpu"), memory_bytes=100_000_000, node_name="n")
    print(failure.failure_class, len(torch.ones(50_000_000)))
"""
FITS = """
for _ in range(3):
    with limit.in_force():
        print(torch.ones(22_500_000).sum().item())
"""
THREAD = "Thread(target=Event().wait, daemon=True).start()"
MAKES = ["torch.ones(1_000_000)", "torch.ones(1000)", "bytearray(100)", "torch.ones(10**9)", THREAD]


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """The words that each case printed."""
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
    """Large, small and Python allocations and stacks of threads all end in an exception that means
    memory, and after it the process allocates freely."""
    assert printed[make] == ["out_of_memory", "50000000"]


def test_a_library_without_room_is_a_refusal_of_memory() -> None:
    """Where the limit allows no more mappings; without a limit it is a library that is broken."""
    text = "tokenizers.abi3.so: failed to map segment from shared object"
    found = {
        limit: describe(ImportError(text), device=None, memory_bytes=limit, node_name="n")
        for limit in (None, 1000)
    }
    assert found[1000].failure_class is FailureClass.OUT_OF_MEMORY
    assert found[None].failure_class is not FailureClass.OUT_OF_MEMORY


@pytest.mark.slow
def test_what_fits_is_not_refused(printed: dict[str, list[str]]) -> None:
    """Nine tenths of the card can be used, again and again."""
    assert printed["fits"] == ["22500000.0"] * 3
