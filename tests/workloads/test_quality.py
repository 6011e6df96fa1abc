"""Quality beside speed: what is compared, and that it is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_cases import MODEL, PROMPTS, Worker, request
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import quality
from workloads.base import NOT_FINITE, ONE_TOKEN, OutOfMemory, Result, Unsupported
from workloads.data.datasets import Reading, load_dataset
from workloads.engines.loaded import Generation
from workloads.engines.transformers.generation import TransformersEngine
from workloads.quality import QualityReferenceParameters, Reference, compare, load, save

VOCABULARY, STEPS = 200, 6


def reference_of(tmp_path: Path, seed: int, prompts: int = 3) -> tuple[Reference, Any, Any]:
    """A reference as it is read back, and the tokens and logits that it was made of."""
    draw = torch.Generator().manual_seed(seed)
    logits = [4 * torch.randn(STEPS, VOCABULARY, generator=draw) for _ in range(prompts)]
    tokens = [one.argmax(-1).tolist() for one in logits]
    tmp_path.mkdir(exist_ok=True)
    save(tmp_path, [[1, 2]] * prompts, tokens, logits)
    found = load(tmp_path)
    assert found is not None and found.prompts == ((1, 2),) * prompts
    return found, tokens, logits


def test_what_is_the_same_agrees_in_every_figure(tmp_path: Path) -> None:
    reference, tokens, logits = reference_of(tmp_path, 0)
    for padding in (0, 5):
        wider = [torch.nn.functional.pad(one, (0, padding), value=-1e4) for one in logits]
        found = compare(tokens, wider, reference)
        assert found["quality_top1_agreement"] == 1.0
        assert found["quality_compared_tokens"] == 3 * STEPS
        assert found["quality_kl"] == pytest.approx(0, abs=1e-6)
        assert found["quality_loss"] == pytest.approx(found["quality_reference_loss"], abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.floats(0.01, 3.0))
def test_the_divergence_is_a_lower_bound_of_the_true_one(tmp_path_factory, seed, noise) -> None:
    """Of 64 log-probabilities and what is left over, never above that of the whole vocabulary, and
    near it where the 64 hold most of the mass."""
    reference, tokens, logits = reference_of(tmp_path_factory.mktemp("r"), seed, prompts=1)
    draw = torch.Generator().manual_seed(seed + 1)
    mine = [one + noise * torch.randn(one.shape, generator=draw) for one in logits]
    found = compare(tokens, mine, reference)  # the same tokens: every step is compared
    p, q = (torch.log_softmax(each[0].double(), -1) for each in (logits, mine))
    true = float((p.exp() * (p - q)).sum(-1).mean())
    assert -1e-9 <= found["quality_kl"] <= true + 1e-6
    assert found["quality_kl"] > 0.8 * true - 1e-6


def test_steps_are_compared_up_to_the_first_difference(tmp_path: Path) -> None:
    reference, tokens, logits = reference_of(tmp_path, 1)
    other = [list(each) for each in tokens]
    other[0][2] = (other[0][2] + 1) % VOCABULARY
    found = compare(other, logits, reference)
    assert found["quality_compared_tokens"] == 2 * STEPS + 3
    assert found["quality_top1_agreement"] == pytest.approx((2 * STEPS + 2) / (2 * STEPS + 3))


def rows(worker: Worker, dataset: str, **changes: Any) -> Result:
    return worker.run(dataset, quality=True, output_tokens=4, batch_size=8, **changes)


@pytest.fixture(scope="module")
def reference(dataset: str) -> Path:
    changes = {"workload": "quality-reference", "batch_size": 1, "output_tokens": 32, "prompts": 8}
    made = quality.run(request(dataset, **changes), Worker().context())
    return Path(made.details["quality_reference"])


def test_without_a_reference_the_row_says_not_compared(worker, dataset, tmp_path, monkeypatch):
    real = quality.cache_root()
    monkeypatch.setattr(quality, "cache_root", lambda: tmp_path / real.name)
    result = rows(worker, dataset)
    assert result.samples and not result.metrics
    assert result.details["quality"].startswith("not compared: its reference is not in the cache")


@pytest.mark.slow
@pytest.mark.usefixtures("reference")
def test_texts_beyond_an_engine_s_window_are_not_compared(worker, dataset, monkeypatch) -> None:
    monkeypatch.setattr(TransformersEngine, "window", 40)
    result = rows(worker, dataset, input_tokens=8)
    assert result.samples and "quality_kl" not in result.metrics
    assert "layers of the model see 40 positions only" in result.details["quality"]


@pytest.mark.slow
@pytest.mark.usefixtures("reference")
def test_the_plain_path_agrees_with_itself_and_others_as_far_as_they_do(worker, dataset) -> None:
    plain, rounded = rows(worker, dataset), rows(worker, dataset, precision="bf16")
    assert plain.details["quality"] == f"compared with the plain path on {len(PROMPTS)} prompts"
    assert plain.metrics["quality_top1_agreement"] > 0.97
    assert plain.metrics["quality_kl"] < 1e-6 < rounded.metrics["quality_kl"] < 0.1
    calls = []
    engine = worker.loaded[f"{MODEL}|fp32|transformers"].engine
    asked = type(engine).generate

    def counted(self: Any, prepared: Any, generation: Generation) -> Any:
        calls.append(generation.keep_logits)
        return asked(self, prepared, generation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "generate", counted)
        assert rows(worker, dataset).metrics == plain.metrics
    assert calls and not any(calls)


@pytest.mark.slow
@pytest.mark.usefixtures("reference")
def test_out_of_memory_while_comparing_costs_no_row(worker, dataset, monkeypatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OutOfMemory("tried to allocate 3 GiB")

    rows(worker, dataset)
    worker.loaded[f"{MODEL}|fp32|transformers"].known.clear()
    monkeypatch.setattr(quality, "generate_once", full)
    result = rows(worker, dataset)
    assert result.samples and not result.metrics
    assert result.details["quality"] == "not compared: OutOfMemory: tried to allocate 3 GiB"


def test_other_prompts_have_another_reference(tmp_path: Path) -> None:
    dataset = tmp_path / "data.jsonl"
    dataset.write_text('{"content": "one"}\n')
    usual = QualityReferenceParameters()
    seen = [
        (str(dataset), Reading(), usual),
        (f"{dataset}2", Reading(), usual),
        (str(dataset), Reading(split="test"), usual),
        (str(dataset), Reading(), QualityReferenceParameters(prompts=9)),
    ]
    names = {quality.reference_directory(MODEL, *each).name for each in seen}
    dataset.write_text('{"content": "one"}\n{"content": "another"}\n')
    names.add(quality.reference_directory(MODEL, *seen[0]).name)
    assert len(names) == 5


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> str:
    answers = ["这条裙子很显瘦，适合夏天。", "", "宽松的裤子穿着舒服，不挑身材。", " "]
    pairs = [{"content": p, "summary": a} for p, a in zip(PROMPTS, answers, strict=False)]
    path = tmp_path_factory.mktemp("answered") / "pairs.json"
    path.write_text("\n".join(map(json.dumps, pairs)))
    return str(path)


def own_loss(worker: Worker, key: str, dataset: str) -> tuple[float, int]:
    """transformers' own loss of the answers, whose prompts have no labels, and their tokens."""
    engine = worker.loaded[key].engine
    texts = quality.answered(engine, load_dataset(dataset).examples)
    summed = count = 0.0
    for text in texts:
        read: dict[str, list[int]] = {"input_ids": [*text.prompt, *text.answer]}
        read["labels"] = [-100] * len(text.prompt) + list(text.answer)
        if engine.model.config.is_encoder_decoder:
            read = {"input_ids": list(text.prompt), "labels": list(text.answer)}
        with torch.no_grad():
            mean = engine.model(**{name: torch.tensor([ids]) for name, ids in read.items()}).loss
        summed += float(mean) * len(text.answer)
        count += len(text.answer)
    return summed / count, int(count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "precision", "model"),
    [
        ("transformers", "fp32", MODEL),
        ("transformers", "bf16", MODEL),
        ("graph", "fp32", MODEL),
        ("transformers", "fp32", "tiny-t5"),
    ],
)
def test_the_loss_on_answers_is_that_of_transformers(worker, answered, engine, precision, model):
    changes: dict[str, Any] = {"model": model, "precision": precision, "prompts": 2}
    if model != MODEL:
        answered = "cnn-dailymail-synthetic"
        changes["max_source_length"] = 64
    shared = {"quality": True, "output_tokens": 2, "batch_size": 2, **changes}
    plain = worker.run(answered, **shared)
    loss, tokens = own_loss(worker, f"{model}|{precision}|transformers", answered)
    if engine != "transformers":
        plain = worker.run(answered, **shared, engine=engine)
    assert plain.metrics["answer_loss"] == pytest.approx(loss, abs=1e-4)
    assert plain.metrics["answer_loss"] > 1
    answers = 2 if model == MODEL else quality.ANSWERS
    assert plain.details["answer_loss"] == f"of {tokens:,} tokens of {answers} answers"


def test_without_answers_or_logits_the_row_says_so(worker, dataset, answered, monkeypatch) -> None:
    assert rows(worker, dataset).details["answer_loss"].startswith("not known: no example")
    first = rows(worker, answered)

    def silent(self: Any, texts: Any) -> Any:
        raise Unsupported("no logits")

    engine = worker.loaded[f"{MODEL}|fp32|transformers"].engine
    monkeypatch.setattr(type(engine), "answer_logits", silent)
    assert rows(worker, answered).metrics == first.metrics
    worker.loaded[f"{MODEL}|fp32|transformers"].known.clear()
    told = rows(worker, answered)
    assert told.details["answer_loss"] == "not known: Unsupported: no logits"
    assert "answer_loss" not in told.metrics and told.samples


def poison(worker: Worker, key: str) -> None:
    norms = [
        one for name, one in worker.loaded[key].engine.model.named_parameters() if "norm" in name
    ]
    norms[-1].data[0] = float("nan")


@pytest.mark.parametrize("batching", ["static", "sorted"])
def test_a_model_that_computes_no_numbers_is_flagged(dataset: str, batching: str) -> None:
    worker = Worker()
    job = {"batching": batching, "output_tokens": 4}
    assert NOT_FINITE not in worker.run(dataset, **job).details
    poison(worker, f"{MODEL}|fp32|transformers")
    details = worker.run(dataset, **job).details
    assert "4 of 4 texts" in details[NOT_FINITE]


def test_texts_of_one_token_are_flagged_where_the_plain_path_s_are_not(
    dataset: str, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker()
    assert ONE_TOKEN not in rows(worker, dataset).details
    engine = worker.loaded[f"{MODEL}|fp32|transformers"].engine
    worker.loaded[f"{MODEL}|fp32|transformers"].known.clear()
    head = engine.model.get_output_embeddings()
    plain = head.forward

    def biased(states: torch.Tensor) -> torch.Tensor:
        logits = plain(states)
        logits[..., 7] += 1e3
        return logits

    monkeypatch.setattr(head, "forward", biased)
    details = rows(worker, dataset).details
    assert details[ONE_TOKEN].startswith("each of")
    assert NOT_FINITE not in details
