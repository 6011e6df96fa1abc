"""Liger's own kernels beside plain code: on a card, else by Triton's interpreter.

Skipped where liger-kernel is not installed; `make test` does not install it, since it needs triton.
In an environment of one's own: pip install -c constraints.txt 'nightgrid[liger]' pytest
The file is a program too, since Triton reads TRITON_INTERPRET when a kernel is declared: it prints
the largest difference of loss, logits or a gradient of each case, relative to that tensor's largest
element.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_cases import small_model
from fused_cases import distance, passed
from peft import LoraConfig, get_peft_model

from workloads.training.fused_kernels import Kernels, fuse, liger
from workloads.training.losses import summed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Of 16 bits the interpreter, which computes with numpy, has this one only.
HALF = "bf16" if DEVICE == "cuda" else "fp16"
FORMATS = {"fp32": torch.float32, HALF: getattr(torch, {"bf16": "bfloat16"}.get(HALF, "float16"))}
HERE = Path(__file__).resolve().parents[1]
#: The largest difference by the bits of a format, relative to the largest element of its tensor.
NEAR = {"fp32": 1e-5, "fp16": 0.01, "bf16": 0.05}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a minute of one core by the interpreter
    pytest.mark.skipif(
        importlib.util.find_spec("liger_kernel") is None,
        reason="liger-kernel is not installed: pip install 'nightgrid[liger]'",
    ),
]


def test_losses_and_gradients_are_those_of_plain_code() -> None:
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    distances: dict[str, float] = json.loads(done.stdout)
    assert len(distances) == 12 + 8
    assert not {n: apart for n, apart in distances.items() if not apart < NEAR[n.split()[-1]]}


def as_on_a_card() -> None:
    """Give Triton's interpreter what compiled kernels have: floats as 32-bit scalars, where it
    leaves Python's, which have no ``to``; and Triton's own rsqrt for that of NVIDIA's library."""
    import liger_kernel.ops.rms_norm as norms
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    name = "_implicit_cvt"  # there is no public one
    converted = getattr(interpreter, name)

    def convert(given: Any) -> Any:
        if isinstance(given, float):
            handle = interpreter.TensorHandle(np.array([given], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return converted(given)

    setattr(interpreter, name, convert)
    setattr(norms, "rsqrt", lambda x: tl.rsqrt(x))  # noqa: B010


def of_model(kind: str, way: str, precision: str) -> float:
    """Distance of a model by kernels from itself."""
    model: Any = small_model(kind, wide=True).to(DEVICE, FORMATS[precision])
    if way == "checkpointed":  # with adapters, too
        gate = "gate_up_proj" if kind.startswith("glm") else "up_proj"
        targets = ["q_proj", "v_proj", gate, "down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plain = passed(model, DEVICE)
    parts, undo = fuse(model, liger())
    assert len(parts) == 3
    worst = max(distance(passed(model, DEVICE), plain) for _ in range(2))
    undo()
    assert distance(passed(model, DEVICE), plain) == 0.0
    return worst


def of_loss(kernels: Kernels, learns: bool, biased: bool, precision: str) -> float:
    """Distance of the loss by kernels from the loss in chunks."""
    torch.manual_seed(0)
    positions, width, words = 60, 16, 90  # four chunks
    head = torch.nn.Linear(width, words, bias=biased).to(DEVICE, FORMATS[precision])
    head.requires_grad_(learns)
    targets = torch.randint(words, (positions,), device=DEVICE)
    states = torch.randn(positions, width).to(DEVICE, FORMATS[precision])
    found = []
    for computed in (kernels.cross_entropy, summed):
        inputs = [states.clone().requires_grad_(), *head.parameters()]
        loss = computed(inputs[0], head.weight, head.bias, targets)
        gradients = torch.autograd.grad(loss / positions, inputs if learns else inputs[:1])
        found.append(dict(enumerate((loss.detach(), *gradients))))
        none = computed(states[:0], head.weight, head.bias, targets[:0])
        assert float(none.detach()) == 0.0
    return distance(*({str(k): v.float() for k, v in each.items()} for each in found))


def main() -> dict[str, float]:
    if DEVICE == "cpu":
        as_on_a_card()
    distances = {}
    for precision in FORMATS:
        kinds = ("llama", "glm", "glm4", "qwen3") if precision == "fp32" else ("llama", "glm")
        for kind, way in product(kinds, ("full", "checkpointed")):
            distances[f"{kind} {way} {precision}"] = of_model(kind, way, precision)
        for learns, biased in product((True, False), repeat=2):
            name = f"loss {'learns' if learns else 'frozen'} {'biased' if biased else 'plain'}"
            distances[f"{name} {precision}"] = of_loss(liger(), learns, biased, precision)
    return distances


if __name__ == "__main__":
    print(json.dumps(main()))
