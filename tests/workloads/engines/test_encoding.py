"""Text encoding, with an encoder of the test's own: how texts become batches, what is counted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from generation_cases import ONCE, Worker, request, write_dataset
from transformers import AutoModelForMaskedLM

from workloads import text_encoding as encoding
from workloads.base import NOT_FINITE, OTHER_OUTPUTS, BadConfiguration, Result
from workloads.bench.measure import Resident
from workloads.data.datasets import Reading, load_dataset
from workloads.models.loading import open_model
from workloads.models.precision import ModelWeights

LENGTHS = (5, 2, 5, 1, 5, 2, 3)


class Letters:
    weights = ModelWeights(weight_bytes=4, parameter_count=1, quantized_share=0.0, detail="none")
    random_weights = True
    details: dict[str, str] = {}  # noqa: RUF012 - read only

    def ids(self, text: str, max_length: int) -> list[int]:
        return [ord(letter) for letter in text][:max_length]

    def prepare(self, texts: Sequence[Sequence[int]]) -> Any:
        return texts

    def __init__(self, logit: float = 0.0) -> None:
        self.logit = logit

    def logits(self, prepared: Any) -> Any:
        return torch.full((1, 1, 1), self.logit)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    lines = ["x" * count for count in LENGTHS]
    return write_dataset(tmp_path_factory.mktemp("data") / "texts.jsonl", lines)


def run(dataset: str, batch_size: int, logit: float = 0.0, **more: Any) -> Result:
    measure = replace(ONCE, warmup=1)
    asked = request(
        dataset, workload="text-encoding", batch_size=batch_size, measure=measure, **more
    )
    worker = Worker()
    worker.loaded[asked.residency_key] = Resident(
        engine=Letters(logit), baseline_host_memory_bytes=0
    )
    return encoding.run(asked, worker.context())


@pytest.mark.parametrize(
    ("size", "batches", "shapes"),
    [
        (1, [(1, n, n) for n in LENGTHS], 4),
        (2, [(2, 7, 10), (2, 6, 10), (2, 7, 10), (1, 3, 3)], 2),
        (9, [(9, 23 + 7, 45)], 1),
    ],
)
def test_texts_are_cut_into_batches_and_padded_to_the_longest(texts, size, batches, shapes) -> None:
    """A row counts texts, tokens and positions. Batches of one size are of one shape if their
    longest texts are equally long. A batch larger than the dataset has texts twice."""
    found = run(texts, size, texts=7)
    timed = [sample for sample in found.samples if not sample.warmup]
    assert [(s.items, s.input_tokens, s.computed_tokens) for s in timed] == batches
    assert (found.shapes, found.shapes_unmet) == (shapes, 0)
    assert 0 < found.tokenization_s < 60


def test_logits_that_are_no_numbers_are_flagged(texts: str) -> None:
    assert NOT_FINITE not in run(texts, 2).details
    assert NOT_FINITE in run(texts, 2, logit=float("nan")).details


@pytest.mark.slow
def test_quality_compares_logits_with_the_plain_path_and_flags_others(monkeypatch) -> None:
    """Against a loop over the model itself; other word vectors are found out. A plain path that
    does not run costs no row."""
    settings = {
        "model": "tiny-bert",
        "precision": "bf16",
        "batch_size": 4,
        "quality": True,
        "texts": 8,
    }
    job = request("english-corpus-synthetic", workload="text-encoding", **settings)
    worker = Worker()
    found = encoding.run(job, worker.context())
    resident = worker.loaded[job.residency_key]
    encoder = resident.engine
    exact = AutoModelForMaskedLM.from_pretrained(open_model("tiny-bert").path).eval()
    same = positions = 0
    for example in load_dataset("english-corpus-synthetic", Reading()).examples[:8]:
        ids = torch.tensor([encoder.ids(example.content, 128)])
        with torch.no_grad():
            one, two = exact(ids).logits, encoder.model(ids).logits
        same += int((one.argmax(-1) == two.argmax(-1)).sum())
        positions += ids.numel()
    assert found.metrics["quality_top1_agreement"] == pytest.approx(same / positions, abs=2e-3)
    assert 0 < found.metrics["quality_logit_error"] < 0.05 and OTHER_OUTPUTS not in found.details
    other = copy.deepcopy(encoder.model)
    torch.nn.init.normal_(other.base_model.embeddings.word_embeddings.weight)
    twisted_encoder = replace(encoder, model=other)
    worker.loaded[job.residency_key] = replace(resident, engine=twisted_encoder, known={})
    twisted = encoding.run(job, worker.context())
    assert twisted.metrics["quality_logit_error"] > 0.5
    assert "off by" in twisted.details[OTHER_OUTPUTS]

    def refuse(_name: str) -> None:
        raise BadConfiguration("no such weights")

    monkeypatch.setattr(encoding, "device_for", refuse)
    worker.loaded[job.residency_key] = replace(resident, known={})
    alone = encoding.run(job, worker.context())
    assert alone.samples and "quality_kl" not in alone.metrics
    assert alone.details["quality"] == "not compared: BadConfiguration: no such weights"
