"""Techniques are really on: each leaves a trace that only it can leave, and the losses alone."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from finetuning_cases import (
    asked,
    loading_on,
    losses,
    refuse,
    small_model,
    train,
    trained,
    training_of,
)
from generation_cases import Worker
from patience import patience

from workloads.base import BadConfiguration, Unsupported
from workloads.devices import device_for
from workloads.devices.cpu import CpuDevice
from workloads.models.attention import register_xformers, xformers_attention
from workloads.models.loading import load_tokenizer, open_model
from workloads.models.precision import stored_bytes
from workloads.training import checkpoints as saver_module
from workloads.training.checkpoints import Checkpoints, Saver, on_host, read_newest, tensor_bytes
from workloads.training.technique import Inputs, Loading, StepBatch, Training
from workloads.training.techniques.batches import DataLoading, Padding, TokenizerKind
from workloads.training.techniques.kernels import Attention, Compilation, compiled_graphs
from workloads.training.techniques.optimization import MemoryRelease, OptimizerChoice
from workloads.training.techniques.precision import Autocast, MatmulBackend, MatmulPrecision

SAME = 1e-5


def step(training: Training, number: int) -> float:
    ids = torch.arange(number, number + 24).reshape(2, 12) % 90 + 3
    loss = training.model(input_ids=ids, labels=ids).loss
    training.backward(loss)
    training.update()
    return float(loss.detach())


@pytest.mark.parametrize(("autocast", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_come_out_in_the_format_of_autocast(autocast: Any, dtype: torch.dtype) -> None:
    training = training_of(small_model())
    Autocast(autocast=autocast).on_model(training)
    seen: set[torch.dtype] = set()
    for module in training.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda m, given, output: seen.add(output.dtype))
    ids = torch.arange(3, 27).reshape(2, 12)
    with training.in_forward():
        loss = training.model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert seen == {dtype}
    parameters = list(training.model.parameters())
    assert {p.dtype for p in parameters} == {p.grad.dtype for p in parameters} == {torch.float32}


@pytest.fixture
def plain_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("wanted", ["high", "medium"])
@pytest.mark.usefixtures("plain_products")
def test_matmul_precision_is_set_or_said_to_have_no_effect(wanted: Any) -> None:
    """Decided by products: where they stay exact, the job is UNSUPPORTED."""
    left, right = torch.randn(128, 512), torch.randn(512, 128)
    exact = left @ right
    try:
        MatmulPrecision(matmul_precision=wanted).on_model(training_of(small_model()))
    except Unsupported as error:
        assert "stay as exact as they were" in str(error)
        torch.testing.assert_close(left @ right, exact, rtol=1e-4, atol=1e-4)
    else:
        assert torch.get_float32_matmul_precision() == wanted
        assert not torch.allclose(left @ right, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("plain_products")
def test_onednn_multiplies_in_fp32_or_the_job_is_unsupported() -> None:
    plain, training = (training_of(small_model()) for _ in range(2))
    expected = [step(plain, number) for number in range(3)]
    before = torch.get_float32_matmul_precision()
    try:
        MatmulBackend(matmul_backend="onednn").on_model(training)
    except Unsupported as error:
        assert "would multiply in bf16" in str(error) or "does not ask" in str(error)
        assert torch.get_float32_matmul_precision() == before
    else:
        assert training.details["matmul_backend"].startswith("onednn, relative error ")
        assert [step(training, n) for n in range(3)] == pytest.approx(expected, rel=SAME)


@pytest.mark.parametrize(
    ("attention", "package"), [("flash_attention_2", "flash-attn"), ("xformers", "xformers")]
)
def test_a_missing_package_is_named(attention, package, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=f"pip install {package}"):
        Attention(attention=attention).before_load(loading_on("cuda"))


def test_another_attention_than_asked_for_is_found_out() -> None:
    loading = loading_on("cpu")
    Attention(attention="eager").before_load(loading)
    assert loading.model_arguments == {"attn_implementation": "eager"}
    net = small_model()
    assert net.config._attn_implementation == "sdpa"
    with pytest.raises(BadConfiguration, match="the model runs 'sdpa'"):
        loading.checks[0](net, None)


@pytest.mark.parametrize("packed", [False, True])
def test_xformers_is_given_what_its_kernel_wants(packed, monkeypatch) -> None:
    """Against the names and the signature of its release, which were read from its wheel, and the
    kernel's documented meaning: no kernel runs here."""
    recorded = json.loads(Path(__file__).with_name("xformers_interface.json").read_text())
    operations: Any = types.ModuleType("xformers.ops")
    masks: Any = types.ModuleType("xformers.ops.fmha.attn_bias")
    for name in recorded["xformers.ops.fmha.attn_bias"]:
        setattr(masks, name, type(name, (), {}))
    for name in recorded["xformers.ops"]:
        setattr(operations, name, getattr(masks, name, None))
    parameter = inspect.Parameter
    signature = inspect.Signature(
        [parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in recorded["positional"]]
        + [parameter(name, parameter.KEYWORD_ONLY) for name in recorded["keyword_only"]]
    )

    def kernel(*given: Any, **words: Any) -> torch.Tensor:
        signature.bind_partial(*given, **words)
        return memory_efficient_attention(*given, **words)

    def memory_efficient_attention(
        query: Any, key: Any, value: Any, attn_bias: Any, p: float, scale: float
    ) -> torch.Tensor:
        # [batch, positions, heads, channels], as documented; rows of a bias aligned to 8 elements.
        assert query.shape[2] == key.shape[2] == value.shape[2] == 4 and p == 0.0
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        scores = q @ k.transpose(-2, -1) * scale
        if type(attn_bias) is masks.LowerTriangularMask:
            scores += torch.full(scores.shape[-2:], -torch.inf).triu(1)
        elif type(attn_bias) is masks.LowerTriangularFromBottomRightMask:
            later = 1 + scores.shape[-1] - scores.shape[-2]
            scores += torch.full(scores.shape[-2:], -torch.inf).triu(later)
        elif attn_bias is not None:
            assert attn_bias.shape == scores.shape and attn_bias.stride(-2) % 8 == 0
            scores += attn_bias
        return (scores.softmax(-1) @ v).transpose(1, 2)

    operations.memory_efficient_attention = kernel
    for name in ("xformers", "xformers.ops.fmha"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (operations, masks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    register_xformers()
    net = small_model("glm")
    ids = torch.arange(3, 25).reshape(2, 11)
    inputs: dict[str, Any] = {"input_ids": ids}
    real = torch.ones_like(ids, dtype=torch.bool)
    if packed:
        inputs["position_ids"] = torch.tensor([[*range(5), *range(6)]] * 2)
    else:
        real[1, 7:] = False
        inputs["attention_mask"] = real.long()
    found = {}
    for attention in ("sdpa", "xformers"):
        net.set_attn_implementation(attention)
        assert net.config._attn_implementation == attention
        found[attention] = net(**inputs, use_cache=False).logits[real]
    torch.testing.assert_close(found["xformers"], found["sdpa"], rtol=1e-4, atol=1e-5)
    if not packed:
        words: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        made = net.generate(ids[:, :6], **words)
        net.set_attn_implementation("sdpa")
        assert torch.equal(made, net.generate(ids[:, :6], **words))
        without_masks()


def without_masks() -> None:
    """Without a mask a layer is causal only where it says so, and the last query sees all."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 5, 8)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def computed(causal: bool, last: int = 5, **words: Any) -> torch.Tensor:
        layer: Any = types.SimpleNamespace(is_causal=causal)
        return xformers_attention(layer, query[:, :, -last:], key, value, None, 8**-0.5, **words)[0]

    for causal in (False, True):
        expected = sdpa(query, key, value, is_causal=causal).transpose(1, 2)
        torch.testing.assert_close(computed(causal), expected)
        torch.testing.assert_close(computed(not causal, is_causal=causal), expected)
    for last in (1, 2):
        torch.testing.assert_close(computed(True, last), expected[:, -last:])
    with pytest.raises(Unsupported, match="does not know softcap"):
        computed(True, softcap=1.0)


def test_a_checkpoint_with_a_slow_tokenizer_only(tmp_path: Path) -> None:
    """transformers gives the fast one without a word where there is no slow one."""
    from transformers import CTRLTokenizer

    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<unk>": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    files = (str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    CTRLTokenizer(*files).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ctrl"}))
    source = replace(open_model("tiny-chatglm3"), tokenizer_path=str(tmp_path))

    def load(kind: Any) -> Loading:
        loading = loading_on("cpu")
        TokenizerKind(tokenizer=kind).before_load(loading)
        tokenizer = load_tokenizer(source, **loading.tokenizer_arguments)
        loading.checks[0](None, tokenizer)
        return loading

    for kind in ("slow", "auto"):
        assert load(kind).details["tokenizer"] == "slow (CTRLTokenizer)"
    with pytest.raises(Unsupported, match="no fast tokenizer"):
        load("fast")
    with pytest.raises(Unsupported, match="no slow tokenizer"):
        train(tokenizer="slow")


@pytest.fixture
def ended() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    for child in set(psutil.Process().children(recursive=True)) - before:
        child.wait(timeout=patience(10))


@pytest.mark.slow
@pytest.mark.usefixtures("ended")
def test_worker_processes_make_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    result = train(learning_rate=1e-2, data_workers=2, prefetch_batches=1)
    assert result.details["data_workers"] == "2 processes made batches"
    assert losses(result) == pytest.approx(losses(trained(learning_rate=1e-2)), rel=SAME)

    makers: list[Any] = []

    def fail(self: Any, training: Any, step: int) -> None:
        makers.extend(psutil.Process().children())
        raise RuntimeError("in the middle")

    monkeypatch.setattr(MemoryRelease, "after_step", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        train(data_workers=2, release_memory_every=1)
    assert len(makers) >= 2


def test_batches_are_pinned_and_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def called(name: str) -> Any:
        return lambda tensor, *_, **how: calls.append((name, how)) or tensor

    for name in ("pin_memory", "to"):
        monkeypatch.setattr(torch.Tensor, name, called(name))
    inputs = Inputs(input_ids=torch.ones(1, 2), labels=torch.ones(1, 2))
    sizes = {"items": 1, "real_tokens": 2, "computed_tokens": 2, "loss_tokens": 1.0}
    batch = StepBatch(micro_batches=(inputs, inputs), **sizes)
    assert len(batch.pin_memory().micro_batches) == 2
    data: Any = types.SimpleNamespace(device=device_for("cpu"))
    DataLoading(pin_memory=True, non_blocking_copies=True).on_data(data)
    data.move(inputs)
    assert calls == [("pin_memory", {})] * 4 + [("to", {"non_blocking": True})] * 2


@pytest.fixture
def cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")


@pytest.fixture
def traced(cache_directory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced, and run by PyTorch as they are: no compiler, so seconds."""
    monkeypatch.setattr(CpuDevice, "compile_backend", "eager")


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_layers_share_one_graph_for_all_mixes_of_lengths() -> None:
    plain, compiled = small_model(), training_of(small_model())
    for each in (plain, compiled.model):
        Padding(padding="packing", packed_attention="apart").on_model(training_of(each))
    technique = Compilation(torch_compile=True, compile_scope="layers")
    technique.on_model(compiled)
    graphs = []
    for lengths in ((3, 9, 2), (5, 4), (7,), (2, 2, 2, 8)):
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        ids = torch.arange(places.numel())[None] % 90 + 3
        found = []
        for each in (plain, compiled.model):
            each.zero_grad()
            loss = each(input_ids=ids, position_ids=places, labels=ids, use_cache=False).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in each.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
        graphs.append(compiled_graphs())
    assert graphs[1] == graphs[-1]
    assert all(layer._compiled_call_impl is not None for layer in compiled.model.model.layers)
    assert compiled.model._compiled_call_impl is None
    compiled.ending.close()


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_rows_of_one_length_are_compiled_once(small_model: str) -> None:
    flat = {"padding": "packing", "packed_attention": "apart", "logits": "chunked"}
    job = {**flat, "packed_length": "longest", "torch_compile": True, "learning_rate": 1e-2}
    assert not refuse(asked(**job))
    worker, known = Worker(), compiled_graphs()
    result = train(worker, model=small_model, **job)
    assert "compile" in worker.phases and result.compile_s > 0.1
    assert result.details["graphs_compiled_in_steps"] == "0"
    # None for the evaluation either.
    assert int(result.details["compiled_graphs"]) == compiled_graphs() - known > 0
    assert result.details["packed_attention"] == "apart, one call a sample"
    assert {s.computed_tokens for s in result.samples} == {int(result.details["packed_length"])}
    assert len({s.input_tokens for s in result.samples}) > 1
    plain = train(model=small_model, learning_rate=1e-2)
    assert losses(result) == pytest.approx(losses(plain), rel=SAME)


@pytest.mark.slow
@pytest.mark.usefixtures("cache_directory")
@pytest.mark.skipif(
    "NIGHTGRID_REHEARSAL" not in os.environ or shutil.which("g++") is None,
    reason="half a minute of g++; `make rehearsal-night` runs it",
)
def test_the_compiler_writes_kernels_and_they_go_with_the_job() -> None:

    class Small(torch.nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(super().forward(given))

    net, given = Small(8, 8), torch.ones(4, 8)
    training = training_of(net)
    with torch.no_grad():  # half of the graphs
        expected = net(given)
        Compilation(torch_compile=True).on_model(training)
        directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert directory.is_dir() and not list(directory.rglob("*.cpp"))
        torch.testing.assert_close(net(given), expected)
    assert list(directory.rglob("*.cpp")) and list(directory.rglob("*.so"))
    training.ending.close()
    assert not directory.exists()


def test_without_a_compiler_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match="no compiler 'no-such-compiler' here"):
        Compilation(torch_compile=True).on_model(training_of(small_model()))


@pytest.mark.usefixtures("cache_directory")
def test_a_model_that_was_not_compiled_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile may leave everything as it is without a word."""
    technique, training = Compilation(torch_compile=True), training_of(small_model())
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    technique.on_model(training)
    with pytest.raises(BadConfiguration, match="no graph was compiled"):
        technique.before_steps(training, lambda number: set())
    directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])  # this job's own, empty at first
    assert not list(directory.iterdir())
    training.ending.close()
    assert not directory.exists()


def test_an_asynchronous_checkpoint_is_of_its_step_and_may_fail_the_job(tmp_path, monkeypatch):
    go_on, write = threading.Event(), saver_module.write_state

    def delayed(state: Any, target: Path) -> None:
        assert go_on.wait(patience(30))
        write(state, target)

    monkeypatch.setattr(saver_module, "write_state", delayed)
    checkpoints = Checkpoints(directory=tmp_path, rank=0)
    training, saver = training_of(small_model()), Saver(checkpoints, "async")
    step(training, 0)
    then = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    saver.save(training, 0)
    assert not list(tmp_path.glob("step-*"))
    step(training, 1)
    go_on.set()
    saver.wait()
    read = read_newest(checkpoints)["weights"]
    assert all(torch.equal(read[name], tensor) for name, tensor in then.items())
    assert not torch.equal(read["lm_head.weight"], training.model.lm_head.weight)
    checkpoints.path(1).with_suffix(".part").mkdir()  # in the writer's way
    saver.save(training, 1)
    with pytest.raises(IsADirectoryError):
        saver.wait()


@pytest.mark.parametrize(
    ("optimizer", "package"),
    [("adamw-8bit", "bitsandbytes"), ("adamw-8bit-torchao", "torchao.optim")],
)
def test_embeddings_keep_averages_in_32_bits(optimizer, package, monkeypatch) -> None:
    """So do small tensors of a model in bf16, also when the state was put back; all other large
    matrices have them in 8; a step is taken by both."""
    pytest.importorskip(package)
    # torchao compiles its step for each shape, which takes seconds and computes the same.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    net = small_model().bfloat16()
    net.resize_token_embeddings(160)
    training = training_of(net)
    OptimizerChoice(optimizer=optimizer).on_model(training)
    wide = torch.nn.Linear(64, 64, dtype=torch.bfloat16)  # 8-bit kinds begin with 4,096 numbers
    net.add_module("wide", wide)
    training.optimizer = training.make_optimizer([*training.trainable()])
    table = net.get_input_embeddings().weight
    weights = {"table": table, "small": wide.bias, "wide": wide.weight}
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    training.optimizer.step()
    size = tensor_bytes([*training.optimizer.state.values()])
    for put_back in (False, True):
        if put_back:
            training.optimizer.load_state_dict(on_host(training.optimizer.state_dict()))
        states: dict[str, list[Any]] = {}
        for name, weight in weights.items():
            values = training.optimizer.state[weight].values()
            states[name] = [v for v in values if getattr(v, "shape", None) == weight.shape]
        for whole in (*states["table"], *states["small"]):
            assert type(whole) is torch.Tensor and whole.dtype == torch.float32
        assert {len(each) for each in states.values()} == {2}
        assert all(stored_bytes(v) < 2 * v.numel() for v in states["wide"])
        assert tensor_bytes([*training.optimizer.state.values()]) == size
    assert training.details["averages_in_32_bits"] == "1 embeddings, small tensors"


def test_memory_is_released_after_the_steps_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    training, releases = training_of(small_model()), []
    monkeypatch.setattr(type(training.device), "release_memory", lambda device: releases.append(1))
    technique = MemoryRelease(release_memory_every=2)
    for number in range(5):
        technique.after_step(training, number)
    technique.after_steps(training)
    assert len(releases) == 2 and training.details["memory_releases"] == "2"
    assert float(training.details["memory_release_s"]) >= 0
