"""Fused kernels in one model, by functions of torch that overwrite what Liger's overwrite.

Liger's own run where liger-kernel is installed, on a card or by Triton's interpreter; `make test`
does not install it, since it needs triton: pip install -c constraints.txt liger-kernel pytest
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
from finetuning_cases import losses, small_model, train, trained, training_of
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy, linear, sigmoid, silu

from workloads.base import Unsupported
from workloads.devices.cpu import CpuDevice
from workloads.training import fused_kernels
from workloads.training.fused_kernels import GATES, NORMS, Kernels, fuse
from workloads.training.losses import summed
from workloads.training.techniques.kernels import FusedKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Of 16 bits the interpreter, which computes with numpy, has this one only.
HALF = "bf16" if DEVICE == "cuda" else "fp16"
FORMATS = {"fp32": torch.float32, HALF: getattr(torch, {"bf16": "bfloat16"}.get(HALF, "float16"))}
HERE = Path(__file__).resolve().parents[1]
#: The largest difference by the bits of a format, relative to the largest element of its tensor.
NEAR = {"fp32": 1e-5, "fp16": 0.01, "bf16": 0.05}
#: Relative, in float32: sums in another order.
SAME = 1e-4
ALL = {NORMS: 5, GATES: 2}


def passed(model: Any, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Loss, logits and all gradients of a pass over two rows, whose positions begin apart."""
    ids = torch.arange(24, device=device).reshape(2, 12) * 7 % 90 + 3
    places = torch.stack((torch.arange(12), torch.arange(5, 17))).to(device)
    model.zero_grad()
    found = model(input_ids=ids, position_ids=places, labels=ids, use_cache=False)
    found.loss.backward()
    learned = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": found.loss.detach(), "logits": found.logits.detach(), **learned}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor of two passes, as a share of its largest element."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp_min(1e-9))
        for name in other
    )


def with_adapters(model: Any, targets: list[str], checkpointed: bool, **more: Any) -> Any:
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, **more))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    if checkpointed:
        given = {"use_reentrant": False}
        adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given)
    return adapted


class _SiluMul(torch.autograd.Function):
    """Overwrites gate and up on the way back."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        share = sigmoid(gate)
        of_up = outer[0] * gate * share
        gate.data.copy_(outer[0] * up * share * (1 + gate * (1 - share)))
        up.data.copy_(of_up)
        return gate, up


def _cross_entropy(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    return cross_entropy(linear(states, weight, bias).float(), targets, reduction="sum")


def in_place_of_liger() -> Kernels:
    """Return the computations of Liger's kernels, with their signatures and habits, by torch."""
    return Kernels(
        title="in place of liger-kernel",
        rms_norm=fused_kernels.rms_normed,
        silu_mul=_SiluMul.apply,
        cross_entropy=_cross_entropy,
    )


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has the package, as far as the technique can tell."""
    monkeypatch.setattr(fused_kernels, "liger", in_place_of_liger)
    find = importlib.util.find_spec
    packages = ("liger_kernel", "triton")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: name in packages or find(name)
    )
    monkeypatch.setattr(CpuDevice, "cannot_compile", lambda self: None)
    monkeypatch.setattr(FusedKernels, "capabilities", {})  # of other devices


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        ("llama", {}, ALL),
        ("llama", {"attention_bias": True, "mlp_bias": True}, ALL),
        ("glm", {}, ALL),  # gate and up are one layer
        ("glm", {"head_dim": 16, "attention_bias": True}, ALL),
        ("glm4", {}, ALL | {NORMS: 9}),  # a norm's output is a term of a sum
        ("qwen3", {}, ALL | {NORMS: 9}),  # norms of queries and keys
        ("phi3", {}, ALL),
        ("gemma", {}, {}),  # 1 + weight, and another activation
        ("phi", {"partial_rotary_factor": 0.5}, {}),  # other norms, and no gates
    ],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["learning", "frozen"])
def test_kernels_change_no_loss_and_no_gradient(kind, changes, parts, frozen) -> None:
    model = small_model(kind, **changes, wide=True)
    if frozen:
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
    plain = passed(model)
    found, _ = fuse(model, in_place_of_liger())
    assert dict(found) == parts
    assert distance(passed(model), plain) < SAME
    assert distance(passed(model), plain) < SAME


@pytest.mark.parametrize("kind", ["llama", "glm"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_they_go_with_adapters_and_checkpointing(kind: str, dora: bool, checkpointed: bool) -> None:
    gates = ["gate_proj", "up_proj"] if kind == "llama" else ["gate_up_proj"]
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", *gates, "down_proj"]
    model = with_adapters(small_model(kind, wide=True), targets, checkpointed, use_dora=dora)
    plain = passed(model)
    found, _ = fuse(model, in_place_of_liger())
    assert dict(found) == ALL
    assert distance(passed(model), plain) < SAME


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_nothing_is_left_of_it(kind: str) -> None:
    other, model = small_model(kind, wide=True), small_model(kind, wide=True)
    module = sys.modules[type(model).__module__]
    known = {part: type(part).forward for part in model.modules()}
    functions, plain, state = dict(vars(module)), passed(model), torch.get_rng_state()
    _, undo = fuse(model, in_place_of_liger())
    assert torch.get_rng_state().equal(state)
    assert all(type(part).forward is forward for part, forward in known.items())
    assert dict(vars(module)) == functions
    passed(model)
    undo()
    undo()
    for one in (other, model):
        assert not any("forward" in vars(part) for part in one.modules())
        assert distance(passed(one), plain) == 0.0


def test_a_hook_in_place_of_a_forward_comes_back() -> None:
    """As accelerate puts one into each module of a model whose weights are in 4 bits."""
    model = small_model("llama", wide=True)
    own = model.model.norm.forward
    model.model.norm.forward = hook = lambda states: own(states)
    _, undo = fuse(model, in_place_of_liger())
    assert model.model.norm.forward is not hook
    undo()
    assert model.model.norm.forward is hook


def test_a_module_that_wants_no_states_keeps_its_own_code() -> None:
    model = small_model("llama", wide=True)
    model.model.learned = learned = torch.nn.Embedding(3, 8)  # takes ids
    learned.weight, learned.eps = torch.nn.Parameter(torch.ones(8)), 1e-6
    found, undo = fuse(model, in_place_of_liger())
    assert dict(found) == ALL and "forward" not in vars(model.model.learned)
    undo()


def test_a_norm_of_states_in_another_type_computes_by_itself() -> None:
    model = small_model("llama", wide=True)
    fuse(model, in_place_of_liger())
    states = torch.randn(1, 3, 32, dtype=torch.bfloat16)
    assert model.model.norm(states).dtype == torch.float32


@pytest.mark.slow
@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("logits", ["all", "chunked"])
def test_a_job_learns_as_without_them(logits: Any) -> None:
    job = {"learning_rate": 1e-2, "logits": logits}
    plain, fused = trained(**job), train(**job, fused_kernels="liger")
    assert losses(fused) == pytest.approx(losses(plain), rel=1e-4)
    parts = fused.details["fused_kernels"]
    assert parts.startswith("in place of liger-kernel: ") and "gated layers" in parts
    assert parts.endswith(", loss") == (logits == "chunked")
    assert "fused_kernels" not in plain.details


@pytest.mark.usefixtures("in_place")
def test_the_kernels_go_with_the_last_step() -> None:
    training = training_of(small_model("glm", wide=True))
    FusedKernels(fused_kernels="liger").on_model(training)
    assert "forward" in vars(training.model.model.norm)
    training.undo.close()
    assert not any("forward" in vars(module) for module in training.model.modules())


@pytest.mark.usefixtures("in_place")
def test_a_model_without_any_such_part_is_refused() -> None:
    training = training_of(small_model("gpt2"))
    with pytest.raises(Unsupported, match="GPT2LMHeadModel has no norm"):
        FusedKernels(fused_kernels="liger").on_model(training)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute of one core by the interpreter
@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None,
    reason="liger-kernel is not installed: pip install liger-kernel",
)
def test_losses_and_gradients_by_liger_are_those_of_plain_code() -> None:
    """In a process of its own, since Triton reads TRITON_INTERPRET when a kernel is declared."""
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
    model: Any = small_model(kind, wide=True).to(DEVICE, FORMATS[precision])
    if way == "checkpointed":  # with adapters, too
        gate = "gate_up_proj" if kind.startswith("glm") else "up_proj"
        model = with_adapters(model, ["q_proj", "v_proj", gate, "down_proj"], True)
    plain = passed(model, DEVICE)
    parts, undo = fuse(model, fused_kernels.liger())
    assert len(parts) == 2
    worst = max(distance(passed(model, DEVICE), plain) for _ in range(2))
    undo()
    assert distance(passed(model, DEVICE), plain) == 0.0
    return worst


def of_loss(learns: bool, biased: bool, precision: str) -> float:
    torch.manual_seed(0)
    positions, width, words = 60, 16, 90  # four chunks
    head = torch.nn.Linear(width, words, bias=biased).to(DEVICE, FORMATS[precision])
    head.requires_grad_(learns)
    targets = torch.randint(words, (positions,), device=DEVICE)
    states = torch.randn(positions, width).to(DEVICE, FORMATS[precision])
    found = []
    for computed in (fused_kernels.liger().cross_entropy, summed):
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
            distances[f"{name} {precision}"] = of_loss(learns, biased, precision)
    return distances


if __name__ == "__main__":
    print(json.dumps(main()))
