"""Processes with the bridge: weight sharing, inference mode, compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from patience import patience

from workloads.base import CompileFailed
from workloads.devices import device_for, environment_for

pytestmark = pytest.mark.timeout(300)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process with the variables of a lazy one on card 0."""
    lazy = environment_for("hpu", 0, threads=1, kind="optimum-habana/lazy")
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **lazy, **environment},
        text=True,
        capture_output=True,
        timeout=patience(120),
    )


#: Prints whether a model's parameters outlive it, and for each job (bf16, fp8, bf16 again after it)
#: whether the graphs that it compiled carry the attribute of inference mode.
LAZY = """
import gc, json, torch, weakref
from workloads.devices import device_for
device = device_for("hpu")
device.synchronize()  # imports the bridge, which does not come with torch in lazy mode
from habana_frameworks.torch.hpu import metrics
model = torch.nn.Linear(4, 4).to("hpu")
gone = weakref.ref(model.weight)
del model
gc.collect()
attributes = []
for fp8 in (False, True, False):
    linear = torch.nn.Linear(4, 4)
    if fp8:
        device.before_quantized_loading()
        device.after_quantized_loading(linear)
    graph = device.capture_graphs(linear)
    graph(torch.ones(1, 4))
    attributes.append(metrics.inference_graphs[-1])
print("SAW", json.dumps({"outlives": gone() is not None, "inference": attributes}))
"""


def lazy_process(**environment: str) -> dict[str, Any]:
    done = run("-c", LAZY, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SAW ")]
    found: dict[str, Any] = json.loads(line.removeprefix("SAW "))
    return found


def test_a_lazy_process_keeps_no_parameter_but_the_mode_of_inference() -> None:
    """Weight sharing, on by default, holds every parameter for good: the next model of a warm
    worker would stand beside the last one. Our variables switch it off. A job in bf16 after one in
    fp8 would compile its graphs for inference mode too."""
    with ThreadPoolExecutor() as pool:
        ours = pool.submit(lazy_process)
        shared = lazy_process(PT_HPU_WEIGHT_SHARING="1")
    assert shared == {"outlives": True, "inference": [False, True, True]}
    assert ours.result() == {"outlives": False, "inference": [False, True, True]}


def test_without_the_bridge_torch_knows_no_backend_for_the_card() -> None:
    """torch says InvalidBackend; the device says so beforehand, and where it can compile nothing
    speaks against it."""
    compile_ = (
        "import torch\nfrom workloads.devices import device_for\ndevice = device_for('hpu')\n"
        "try:\n    torch.compile(torch.nn.Identity(), backend='hpu_backend')(torch.ones(1))\n"
        "except Exception as error:\n    print(type(device.classify(error)).__name__, error)\n"
        "print(device.cannot_compile())"
    )
    done = run("-c", compile_)
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = done.stdout.strip().splitlines()[0], done.stdout.strip().splitlines()[-1]
    assert CompileFailed.__name__ in first and "hpu_backend" in first
    assert "lazy mode" in last
    assert device_for("hpu").cannot_compile() is None  # this process is not lazy
