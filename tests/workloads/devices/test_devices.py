"""Devices: declarations, what a process sees, errors, compiled code, and the checks of a card."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from outside_device import install, offer
from source_tree import ROOT

from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import FailureClass, classify
from orchestrator.core.topology import Card
from orchestrator.worker.protocol import WorkerConfig
from orchestrator.worker.worker import CardWorker, describe
from workloads import base, devices
from workloads.base import BadConfiguration, CardFaulty, OutOfMemory
from workloads.devices import device_class, own_devices
from workloads.devices.base import (
    COMPILED_DIRECTORY,
    COMPILED_SIZE,
    Compilations,
    by_text,
    compiled_directory,
    compiled_size_mib,
)
from workloads.devices.cpu import CpuDevice
from workloads.devices.cuda import expandable_segments

HERE = Path(__file__).parent
#: Messages as libraries write them, each with its source, and the class each stands for (null: of
#: no known class). ``read`` says where it was compared word for word: in the library's source, an
#: installed package or a public log; a source with an address was.
ERRORS = (HERE / "recorded_backend_errors.jsonl").read_text().splitlines()


def raised_as(name: str, message: str, number: int | None) -> BaseException:
    """The exception of a library, which need not be installed here."""
    module, _, kind = name.rpartition(".")
    if not module:
        made = getattr(builtins, name)
    else:
        of_torch = getattr(sys.modules[module], kind) if module.startswith("torch") else None
        made = of_torch or type(kind, (Exception,), {"__module__": module})
    if number is not None:
        return cast("BaseException", made(number, message))
    return cast("BaseException", made(message) if message else made())


@pytest.mark.parametrize("recorded", map(json.loads, ERRORS), ids=lambda one: one["message"][:40])
def test_libraries_errors_are_told_apart_by_their_words(recorded: dict[str, Any]) -> None:
    text = recorded["message"]
    assert recorded["source"]
    error = raised_as(recorded["type"], text, recorded.get("errno"))
    device, engine = devices.device_for(recorded["device"]), recorded.get("engine", "")
    known = device.classify(error)
    expected = FailureClass.ERROR
    if recorded["class"] is not None:
        kind = getattr(base, recorded["class"], None) or getattr(builtins, recorded["class"])
        expected = classify(kind(text))
        if not engine:
            assert type(known) is kind
    elif not engine:
        assert known is error
    failure = describe(error, device=device, memory_bytes=None, node_name="n", engine=engine)
    assert failure.failure_class is expected
    assert not text or " ".join(text.split())[:1500] in failure.message, "the words are kept"


def test_cudnns_attention_is_off_unless_the_node_asks_for_it(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda = devices.device_for("cuda")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        monkeypatch.delenv("NIGHTGRID_CUDNN_ATTENTION", raising=False)
        torch.backends.cuda.enable_cudnn_sdp(True)  # as the last job may have left it
        assert cuda.configure()["cudnn_attention"] == "off"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        monkeypatch.setenv("NIGHTGRID_CUDNN_ATTENTION", "1")
        assert cuda.configure()["cudnn_attention"] == "on"
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", False),
        ("max_split_size_mb:64, expandable_segments:true", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("max_split_size_mb:64", False),
    ],
)
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_read_from_torchs_variables(variable, options, expected) -> None:
    assert expandable_segments({variable: options} if options else {}) is expected


def test_an_unknown_device_is_refused_by_name() -> None:
    for ask in (devices.device_for, devices.device_class):
        with pytest.raises(BadConfiguration, match=r"no device 'tpu'. There is: cpu, cuda"):
            ask("tpu")
    with pytest.raises(BadConfiguration, match=r"no accelerator 'TPU'; there is: HPU, GPU, CPU"):
        devices.of_accelerator("TPU")


def test_every_card_sees_only_itself() -> None:
    assert devices.environment_for("cuda", 5)["CUDA_VISIBLE_DEVICES"] == "5"
    hpu = devices.environment_for("hpu", 5, threads=2)
    assert hpu["HABANA_VISIBLE_MODULES"] == hpu["HLS_MODULE_ID"] == "5"
    assert hpu["PT_HPU_LAZY_MODE"] == "0"
    assert hpu["OMP_NUM_THREADS"] == "2"
    assert devices.environment_for("cpu", 5)["CUDA_VISIBLE_DEVICES"] == ""
    kind = "optimum-habana/lazy"
    lazy = devices.environment_for("hpu", 1, kind=kind, cards=2, compiled="/node/1.24-HL-225")
    assert lazy["PT_HPU_LAZY_MODE"] == "1" and lazy["PT_HPU_WEIGHT_SHARING"] == "0"
    assert lazy["PT_HPU_ENABLE_LAZY_COLLECTIVES"] == "true"
    recipes = f"/node/1.24-HL-225/{kind}-2x,false,8192"
    assert lazy["PT_HPU_RECIPE_CACHE_CONFIG"] == recipes
    compiled = devices.environment_for("hpu", 1, kind="optimum-habana/compile")
    assert compiled["PT_HPU_LAZY_MODE"] == "0"


def test_a_process_of_a_gang_sees_its_gang() -> None:
    """As Habana documents it: all modules of the job on this server in each of its processes, and
    its own module beside them. Other kinds of cards show a process its own card alone."""
    rank = devices.environment_for("hpu", 6, cards=4, gang=(4, 5, 6, 7))
    assert rank["HABANA_VISIBLE_MODULES"] == "4,5,6,7" and rank["HLS_MODULE_ID"] == "6"
    assert devices.environment_for("cuda", 6, gang=(4, 5, 6, 7))["CUDA_VISIBLE_DEVICES"] == "6"
    behind = devices.environment_for("cuda", 6, uuids={6: "GPU-8dcb4b4c"})  # a lost card
    assert behind["CUDA_VISIBLE_DEVICES"] == "GPU-8dcb4b4c"


def bridge(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, object]) -> None:
    """Install the modules of ``habana_frameworks.torch`` with these members."""
    names = ["habana_frameworks", "habana_frameworks.torch"]
    for name in (*names, *(f"{names[-1]}.{module}" for module in modules)):
        made = types.ModuleType(name)
        vars(made).update(modules.get(name.rpartition(".")[2], {}))
        monkeypatch.setitem(sys.modules, name, made)


def test_gaudi_is_asked_through_its_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, memory and steps come from habana_frameworks, whose keys are its own."""
    calls: list[str] = []
    names = iter(["GAUDI", "GAUDI", "GAUDI2"])
    hpu = {
        "get_device_name": lambda: next(names),
        "memory_stats": lambda: {"Limit": 94, "InUse": 1, "MaxInUse": 7},
        "synchronize": lambda: calls.append("synchronize"),
        "reset_peak_memory_stats": lambda: calls.append("reset"),
    }
    bridge(monkeypatch, hpu=hpu, core={"mark_step": lambda: calls.append("mark_step")})
    device = devices.device_for("hpu")
    assert (device.memory_limit_bytes(), device.peak_memory_bytes()) == (94, 7)
    device.synchronize()
    device.mark_step()
    device.reset_peak_memory()
    assert calls == ["synchronize", "mark_step", "reset"]
    assert device.lacks("bf16") is None
    assert "first-generation" in (device.lacks("fp16") or "")
    assert "first-generation" in (device.lacks("int4") or "")
    assert device.lacks("fp16") is None


def test_what_a_gaudi_compiles_is_counted_by_its_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are microseconds there; figures that the row does not know are left out."""
    counted = {
        "graph_compilation": [("TotalNumber", 7), ("TotalTime", 1_500_000), ("AvgTime", 3)],
        "cpu_fallback": [("TotalNumber", 2), ("FallbackOps", {"aten::nonzero": 2})],
        "recipe_cache": [("TotalHit", 5), ("TotalMiss", 3)],
    }
    bridge = types.SimpleNamespace(
        metric_global=lambda name: types.SimpleNamespace(stats=lambda: counted[name])
    )
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.hpu.metrics", bridge)
    device = device_class("hpu")()
    before = device.compilations()
    counted["graph_compilation"] = [("TotalNumber", 9), ("TotalTime", 4_000_000)]
    counted["recipe_cache"] = [("TotalHit", 6), ("TotalMiss", 5)]
    found = device.compilations().since(before)
    assert (found.graphs, found.compile_s) == (2, 2.5)
    assert (found.recalled, found.cpu_fallbacks) == (1, 0)
    assert found.as_text() == (
        "graph_compilation_number 2, graph_compilation_us 2.5e+06, recipe_cache_hits 1, "
        "recipe_cache_misses 2"
    )
    bridge.metric_global = lambda name: None  # a bridge that counts nothing
    assert device.compilations().graphs is None


@pytest.mark.parametrize("newest", [True, False])
def test_the_bridge_is_told_of_a_quantized_model_by_the_newest_name_it_has(newest, monkeypatch):
    """Older releases have other names and arguments; one that has none of them is refused."""
    calls: list[object] = []
    of_old = {
        "hpu_set_env": lambda: calls.append("old"),
        "hpu_initialize": lambda model, mark_only_scales_as_const: calls.append(
            (model, mark_only_scales_as_const)
        ),
    }
    of_new = {
        "hpu_inference_set_env": lambda: calls.append("new"),
        "hpu_inference_initialize": lambda model, mark_scales, mark_non_scales: calls.append(
            (model, mark_scales, mark_non_scales)
        ),
    }
    device = devices.device_for("hpu")
    bridge(monkeypatch, core={})
    with pytest.raises(base.Unsupported, match="has no hpu_inference_set_env"):
        device.before_quantized_loading()
    bridge(monkeypatch, core=of_old | of_new if newest else of_old)
    device.before_quantized_loading()
    device.after_quantized_loading("a model")
    assert calls == (["new", ("a model", True, False)] if newest else ["old", ("a model", True)])


def test_a_device_may_declare_its_errors_by_pairs_in_any_order() -> None:
    pairs: Any = ((CardFaulty, ("lost",)), (OutOfMemory, ("full",)), (CardFaulty, ("dead",)))
    for words, expected in (("lost", CardFaulty), ("full", OutOfMemory), ("dead", CardFaulty)):
        assert type(by_text(RuntimeError(f"the card is {words}"), pairs)) is expected


def test_without_the_bridge_a_gaudi_card_cannot_be_had() -> None:
    """Asking for hpu where it is not there is an acquire failure, never another device."""
    device = devices.device_for("hpu")
    for use in (device.synchronize, device.device_name, device.peak_memory_bytes):
        with pytest.raises(base.CardNotAcquired, match="no Habana bridge here"):
            use()


def test_memory_that_a_step_freed_serves_the_next_until_it_is_released() -> None:
    """A process of its own: the allocator's settings are the process's."""
    program = """
import resource
from workloads.devices import device_for
from workloads.devices.monitor.host import resident_bytes

def step():
    blocks = [b"x" * (megabytes << 20) for megabytes in (3, 17, 40, 2)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

cpu = device_for("cpu")
step()
before = faults()
for _ in range(4):
    step()
held = resident_bytes()
print(faults() - before, held - (cpu.release_memory() or resident_bytes()))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    faults, given_back = map(int, told.stdout.split())
    assert faults < 500  # of 63,000 pages that the steps touch
    assert given_back > 50 << 20


def test_seeding_repeats_all_random_numbers() -> None:
    cpu = devices.device_for("cpu")

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    cpu.seed(7)
    first = draw()
    cpu.seed(7)
    assert draw() == first
    cpu.seed(8)
    assert draw() != first
    torch.manual_seed(7)
    assert float(torch.rand(1)) == first[2]  # as torch's own, which a processor does not call


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux only")
def test_running_out_of_memory_for_real_is_classified() -> None:
    code = """
import resource, sys, torch
from workloads import base as errors, devices
with open("/proc/self/statm") as f:
    used = int(f.read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)
cpu = devices.device_for("cpu")
for allocate in (lambda: torch.ones(1_000_000_000), lambda: bytearray(4_000_000_000)):
    try:
        allocate()
    except BaseException as error:
        found = cpu.classify(error)
        assert type(found) is errors.OutOfMemory, repr(found)
    else:
        sys.exit("the limit did not hold")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_fused_optimizer_is_fused() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    made = devices.device_for("cpu").fused_adamw(weights, lr=0.1, weight_decay=0.5)
    assert [made.defaults[name] for name in ("fused", "lr", "weight_decay")] == [True, 0.1, 0.5]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(COMPILED_DIRECTORY, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


def test_each_release_and_card_has_a_directory_that_stays(compiled: Path) -> None:
    first = compiled_directory("plugin-1.24.0-torch-2.10.0a0+git-HL-225")
    assert first is not None and Path(first).is_dir() and Path(first).parent == compiled
    assert compiled_directory("plugin-1.24.0-torch-2.10.0a0+git-HL-225") == first
    others = map(compiled_directory, ("plugin-1.24.1-HL-225", "plugin-1.24.0-HL-325"))
    assert len({first, *others}) == 3
    odd = compiled_directory("../../etc/a b")
    assert odd is not None and Path(odd).parent == compiled


def test_what_nobody_has_used_for_a_month_is_removed(compiled: Path) -> None:
    old, used = (compiled_directory(name) for name in ("old", "used"))
    assert old is not None and used is not None
    for directory in (old, used):
        (Path(directory) / "recipe").touch()
        os.utime(directory, (1e9, 1e9))
    compiled_directory("used")
    assert not Path(old).exists() and (Path(used) / "recipe").exists()


def test_a_disk_that_takes_nothing_costs_the_cache_alone(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(COMPILED_DIRECTORY, str(tmp_path / "file"))
    assert compiled_directory("plugin") is None
    assert compiled_directory("") is None and device_class("cpu").compiler() == ""


def test_the_size_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_size_mib() == 8192
    monkeypatch.setenv(COMPILED_SIZE, "100")
    assert compiled_size_mib() == 100
    monkeypatch.setenv(COMPILED_SIZE, "0")
    with pytest.raises(BadConfiguration, match="NIGHTGRID_COMPILED_MIB='0'"):
        compiled_size_mib()


def test_a_row_says_cold_or_cached() -> None:
    known = Compilations(graphs=3, compile_s=2.0)
    assert Compilations(graphs=5, compile_s=32.5).since(known).temperature() == (
        "cold: 2 graphs compiled in 30.5 s"
    )
    assert known.since(known).temperature() == "cached: every graph was known"
    assert Compilations(graphs=5).since(known).temperature() == ""


CARD = Card(node_id="n1", index=3, accelerator=Accelerator.HPU)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float32])
def test_no_precision_that_a_card_may_choose_is_a_fault(precision, monkeypatch) -> None:
    multiply = torch.Tensor.__matmul__

    def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if not left.is_floating_point():
            return multiply(left, right)
        return multiply(left.to(precision), right.to(precision)).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    before = torch.get_rng_state()
    CpuDevice().preflight()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wrong", [1.0, -1.0, float("nan"), float("inf")])
def test_one_wrong_element_is_a_fault(wrong, monkeypatch) -> None:
    multiply = torch.Tensor.__matmul__

    def broken(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        if product.is_floating_point():
            product[17, 5] += wrong
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", broken)
    with pytest.raises(CardFaulty, match="has 1 wrong elements of 65,536"):
        CpuDevice().preflight()


def test_memory_that_changes_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = torch.Tensor.to

    def leaky(tensor: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
        moved = carry(tensor, *arguments, **named).clone()
        if moved.dtype is torch.int32:
            moved[123_456] ^= 1 << 9
        return moved

    monkeypatch.setattr(torch.Tensor, "to", leaky)
    with pytest.raises(CardFaulty, match="came back changed"):
        CpuDevice().preflight()


@pytest.mark.parametrize("error", [CardFaulty("wrong"), RuntimeError("unknown error")])
def test_a_worker_on_a_faulty_card_does_not_start(error, monkeypatch) -> None:

    def preflight(_: CpuDevice) -> None:
        raise error

    monkeypatch.setattr(CpuDevice, "preflight", preflight)
    config = WorkerConfig(worker_id="w", card=CARD, node_name="n1", emulated=True)
    worker = CardWorker(config)
    with pytest.raises(CardFaulty, match="HPU3") as caught:
        worker.start()
    assert worker.failure(caught.value).failure_class is FailureClass.CARD_FAULTY


def test_a_capability_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no capability 'pined_memory'"):
        devices.device_spec("cuda").can("pined_memory")
    with pytest.raises(ValueError, match="no capabilities streems"):
        dataclasses.replace(devices.device_spec("cuda"), capabilities=frozenset({"streems"}))


@pytest.mark.parametrize("spec", own_devices(), ids=lambda spec: spec.name)
def test_a_device_has_a_name_in_capitals_and_one_variable_for_its_cards(spec) -> None:
    for name in ("xpu", "1XPU", "X PU", ""):
        with pytest.raises(ValueError, match="is no name in capitals"):
            dataclasses.replace(spec, accelerator=name)
    variable = spec.visible_variable
    assert spec.visible(2, 3) == ({variable: "2,3"} if variable else {})
    assert not variable or devices.environment_for(spec.name, 2)[variable] == "2"


KNOWN = """
import sys
from workloads.devices import all_devices, environment_for
from workloads.models import precision
print(*(spec.accelerator for spec in all_devices()))
[environment_for(name, 0) for name in ("cpu", "cuda", "hpu")], precision.table()
print(*sorted({"torch", "transformers"} & set(sys.modules)))
"""


def known(directory: Path) -> list[str]:
    """The lines of a new process: accelerators, what it imported for them, and warnings."""
    done = subprocess.run(
        [sys.executable, "-c", KNOWN],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines() + done.stderr.splitlines()


def test_a_device_of_another_package_stands_after_ours(tmp_path: Path) -> None:
    install(tmp_path)
    accelerators, imported, *warnings = known(tmp_path)
    assert accelerators == "HPU GPU CPU XPU" and not warnings
    assert imported == ""


SPEC = """
from workloads.devices import DeviceSpec
SPEC = DeviceSpec(name="outside", accelerator="GPU", title="t", summary="s", handle="m:C",
    ray_resource="R", precisions={})
"""


def test_a_device_with_a_taken_name_takes_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(SPEC)
    offer(tmp_path, {"outside": "outside:SPEC"})
    accelerators, _, *warnings = known(tmp_path)
    assert accelerators == "HPU GPU CPU"
    assert "device outside is left out: there is an accelerator GPU" in "\n".join(warnings)
