"""Sequence-to-sequence models: pairs of texts, what is learned of them, and what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finetuning_cases import SUMMARIES, losses, sample_format, train, trained
from generation_cases import Worker, request
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import GridError
from orchestrator.grid.parser import parse_grid
from workloads import quality
from workloads.base import BadConfiguration
from workloads.data.embedded import news_examples
from workloads.training.data import NOT_LEARNED, SampleFormat
from workloads.training.pairs import Pair, collate, encode

PREFIXED: dict[str, Any] = {"source_prefix": "summarize: ", "max_source_length": 48}
WRITING: dict[str, Any] = PREFIXED | {"model": "tiny-t5"}
ARTICLES = "cnn-dailymail-synthetic"


@pytest.fixture(scope="module")
def form() -> SampleFormat:
    return sample_format("tiny-t5", PREFIXED | {"max_target_length": 24})


IDS = st.lists(st.integers(2, 99), min_size=1, max_size=15).map(lambda ids: (*ids, 1))


@given(pairs=st.lists(st.builds(Pair, IDS, IDS), min_size=1, max_size=5), fixed=st.booleans())
def test_a_decoder_is_given_its_target_one_place_later(pairs: list[Pair], fixed: bool) -> None:
    form: Any = SimpleNamespace(
        config=SimpleNamespace(decoder_start_token_id=77),
        parameters={"max_source_length": 20, "max_target_length": 18},
        pad_token_id=0,
    )
    made = collate(pairs, form, fixed)
    assert made.decoder_input_ids is not None and made.attention_mask is not None
    longest = max(len(pair.source) for pair in pairs), max(len(pair.target) for pair in pairs)
    assert made.shape == (len(pairs), *((20, 18) if fixed else longest))
    assert made.positions == len(pairs) * sum(made.shape[1:])
    for row, pair in enumerate(pairs):
        length = len(pair.target)
        labels = made.labels[row].tolist()
        assert labels[:length] == list(pair.target) and {*labels[length:]} <= {NOT_LEARNED}
        assert made.decoder_input_ids[row].tolist()[:length] == [77, *pair.target[:-1]]
        mask = made.attention_mask[row].tolist()
        assert made.input_ids[row].tolist()[: len(pair.source)] == list(pair.source)
        assert sum(mask) == len(pair.source) and mask == sorted(mask, reverse=True)


def test_pairs_are_those_of_the_librarys_own_script(form: SampleFormat) -> None:
    """Of transformers' run_summarization.py with its collator."""
    from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

    examples = news_examples(4)
    made = collate(encode(examples, 4, form).samples, form)
    model = AutoModelForSeq2SeqLM.from_pretrained(form.source.path, dtype=torch.float32)
    cut = {"truncation": True, "max_length": 48}
    theirs = form.tokenizer(["summarize: " + one.content for one in examples], **cut)
    theirs["labels"] = form.tokenizer(
        text_target=[one.summary for one in examples], truncation=True, max_length=24
    )["input_ids"]
    rows = [{name: theirs[name][row] for name in theirs} for row in range(4)]
    side, form.tokenizer.padding_side = form.tokenizer.padding_side, "right"
    batch = DataCollatorForSeq2Seq(form.tokenizer, model=model)(rows)
    form.tokenizer.padding_side = side
    learned = made.labels != NOT_LEARNED
    for name, tensor in made.tensors().items():
        where = learned if "decoder" in name else ...
        assert torch.equal(tensor[where], batch[name][where]), name
    with torch.no_grad():
        loss = float(model(**batch).loss)
    assert losses(trained(**SUMMARIES))[0] == pytest.approx(loss, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"gradient_checkpointing": True, "gradient_accumulation": 2},
        {"padding": "fixed"},
        {"logits": "all", "optimizer": "adamw-fused", "data_workers": 1},
    ],
    ids=lambda asked: " ".join(asked),
)
def test_techniques_change_how_pairs_are_learned_and_not_what(asked: dict[str, Any]) -> None:
    plain = losses(trained(**SUMMARIES))
    assert plain[-1] < 0.95 * plain[0]
    assert losses(trained(**SUMMARIES, **asked)) == pytest.approx(plain, abs=2e-5)


def test_the_row_tells_both_sides(form: SampleFormat) -> None:
    result = trained(**SUMMARIES)
    (first, *_) = result.samples
    assert first.input_tokens == first.computed_tokens == 4 * (48 + 24)
    said = result.details
    assert said["source_prefix"] == "'summarize: '" and said["pairs"] == "32"
    assert said["empty_summaries"] == "0 of 100 left out"
    assert result.random_weights and result.synthetic_data
    square, wide, vocabulary = 128 * 128, 128 * 512, form.config.vocab_size * 128
    of_source = 2 * (4 * square + 2 * wide) + 2 * 2 * square  # cross attention reads the encoder's
    of_target = 2 * (6 * square + 2 * wide) + vocabulary
    # Twice a weight forward, twice for its own gradient, and twice back to what is below it.
    expected = 6 * (of_source * 48 + of_target * 24) / 72
    assert result.train_flops_per_token == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_an_adapter_of_pairs_is_kept_and_put_on() -> None:
    lora = SUMMARIES | {"method": "lora", "learning_rate": 2e-2, "save_adapter": "of-pairs"}
    result = train(**lora)
    assert result.details["adapter"] == "rank 8, alpha 16 on q, k, v"
    assert losses(result)[-1] < losses(result)[0]
    job = WRITING | {"prompts": 2, "output_tokens": 6}
    plain, adapted = (Worker().run(ARTICLES, **job, adapter=name) for name in (None, "of-pairs"))
    assert [i.output_text for i in plain.items] != [i.output_text for i in adapted.items]


def test_empty_summaries_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "news.jsonl"
    rows = [{"article": f"Report {n}.", "highlights": "Short." if n % 3 else " "} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    result = train(**(SUMMARIES | {"dataset": str(path), "steps": 1}))
    assert result.details["empty_summaries"] == "3 of 9 left out"
    assert result.details["learned"] == "the highlights" and result.details["pairs"] == "6"
    with pytest.raises(BadConfiguration, match="gives 6 samples, and one step takes 8"):
        train(**(SUMMARIES | {"dataset": str(path), "batch_size": 8}))
    path.write_text("\n".join(json.dumps(row | {"highlights": ""}) for row in rows))
    with pytest.raises(BadConfiguration, match="none of the dataset's 9 examples has a summary"):
        train(**(SUMMARIES | {"dataset": str(path)}))


def grid(**asked: Any) -> bytes:
    fields = {"name": "one", "workload": "finetuning", "accelerator": "CPU", "precision": "fp32"}
    return json.dumps({"name": "g", "experiments": [fields | asked]}).encode()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "tiny-chatglm3", "source_prefix": "x: "}, "it is a setting of a sequence-to"),
        ({"model": "tiny-chatglm3", "max_target_length": 64}, "a causal language model (GlmFor"),
        ({"model": "tiny-chatglm3", "max_source_length": 64}, "has none; it is a setting of"),
        ({"model": "tiny-t5", "max_length": 1024}, "a length of the source and one of the target"),
        ({"model": "tiny-t5", "max_target_length": 0}, "0: at least 2 is wanted"),
    ],
)
def test_the_plan_refuses_settings_of_another_kind(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(GridError) as found:
        parse_grid(grid(**asked), "g")
    (problem,) = found.value.problems
    assert words in problem.message and problem.path.endswith(tuple(asked))


def test_a_published_t5_without_its_prefix_is_told(form: SampleFormat) -> None:
    bare = replace(form, parameters={"max_source_length": 48, "max_target_length": 24})
    told = encode(news_examples(2), 2, bare).details["source_prefix"]
    assert told == "none"
    entry = replace(form.source.entry, name="google-t5/t5-3b")
    named = replace(bare, source=replace(form.source, entry=entry))
    told = encode(news_examples(2), 2, named).details["source_prefix"]
    assert told == "none, although t5-3b was trained with one such as 'summarize: '"


def test_summaries_are_the_same_whatever_the_batch() -> None:
    worker = Worker()
    asked = WRITING | {"prompts": 6, "output_tokens": 16}
    together = worker.run(ARTICLES, **asked, batch_size=4)
    single = worker.run(ARTICLES, **asked, batch_size=1)
    written = {item.index: item.output_text for item in together.items}
    assert written == {item.index: item.output_text for item in single.items}
    assert len({item.output_tokens for item in single.items}) > 2
    for sample in together.samples:
        assert sample.encoder_s is not None and sample.ttft_s is not None
        assert 0 < sample.encoder_s < sample.ttft_s < sample.wall_s
        assert sample.computed_tokens >= sample.input_tokens + sample.output_tokens
    wall_s = sum(sample.wall_s for sample in together.samples)
    found = together.metrics
    assert found["summaries_per_s"] == pytest.approx(6 / wall_s)
    assert 2 * (found["encoder_s"] + found["decoder_s"]) == pytest.approx(wall_s)


def test_a_prefix_is_read_and_a_long_source_keeps_its_end() -> None:
    short = {"model": "tiny-t5", "max_source_length": 12, "prompts": 2, "output_tokens": 6}
    texts, lengths = [], []
    for prefix in ("", "summarize: "):
        worker = Worker()
        result = worker.run(ARTICLES, **short, source_prefix=prefix)
        (engine,) = (kept.engine for kept in worker.loaded.values())
        assert engine.encode("word " * 40)[-1] == engine.tokenizer.eos_token_id
        texts.append([item.output_text for item in result.items])
        lengths.append([item.input_tokens for item in result.items])
    assert texts[0] != texts[1] and lengths == [[12, 12]] * 2


@pytest.mark.slow
def test_quality_of_summaries_stands_beside_their_speed() -> None:
    texts = {"workload": "quality-reference", "batch_size": 1, "prompts": 8, "output_tokens": 32}
    quality.run(request(ARTICLES, **WRITING, **texts), Worker().context())
    asked = WRITING | {"prompts": 2, "output_tokens": 4, "quality": True}
    plain = Worker().run(ARTICLES, **asked)
    assert plain.metrics["quality_top1_agreement"] == 1.0
    half = Worker().run(ARTICLES, **asked, precision="bf16")
    assert 0 < half.metrics["quality_top1_agreement"] <= 1.0 and half.metrics["quality_kl"] > 0


def test_articles_are_the_same_everywhere() -> None:
    articles = news_examples(100)
    assert articles[:10] == news_examples(10) and all(one.synthetic for one in articles)
    assert len({one.content for one in articles}) == 100
    words = sorted(len(one.content.split()) for one in articles)
    assert words[0] >= 250 and words[-1] <= 1450 and 500 < words[50] < 700
    assert all(30 <= len(one.summary.split()) <= 75 for one in articles)
