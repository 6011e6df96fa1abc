"""Batching sorted and continuous: the same texts, less work, honest counts and times."""

from __future__ import annotations

import threading

import pytest
from generation_cases import Worker, request

from workloads.base import Result
from workloads.devices import device_for
from workloads.engines.graph import engine as graph
from workloads.engines.graph.engine import ContinuousBatch, Text
from workloads.engines.loaded import ContinuousGeneration, Generation


def texts(result: Result) -> dict[int, tuple[int, int, str | None]]:
    return {i.index: (i.input_tokens, i.output_tokens, i.output_text) for i in result.items}


@pytest.fixture(scope="module")
def plain(worker: Worker, dataset: str) -> Result:
    return worker.run(dataset, batch_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batching", "engine"), [("sorted", "transformers"), ("continuous", "graph")]
)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batching_changes_no_text(batching, engine, batch_size, worker, dataset, plain) -> None:
    result = worker.run(dataset, batch_size=batch_size, batching=batching, engine=engine)
    assert texts(result) == texts(plain)
    for count in ("items", "input_tokens", "output_tokens"):
        assert sum(getattr(s, count) for s in result.samples) == sum(
            getattr(s, count) for s in plain.samples
        )


@pytest.mark.slow
def test_sorting_pads_less(worker: Worker, dataset: str, plain: Result) -> None:
    result = worker.run(dataset, batch_size=3, batching="sorted")
    lengths = [item.input_tokens for item in result.items]
    assert lengths == sorted(lengths)
    assert sum(s.computed_tokens for s in result.samples) < sum(
        s.computed_tokens for s in plain.samples
    )


def test_the_times_of_continuous_batching_fit_together(worker: Worker, dataset: str) -> None:
    result = worker.run(
        dataset,
        batch_size=3,
        batching="continuous",
        engine="graph",
        ignore_eos=True,
        output_tokens=9,
    )
    (sample,) = result.samples
    assert {item.output_tokens for item in result.items} == {9}
    assert all(item.ttft_s and 0 < item.ttft_s <= item.latency_s for item in result.items)
    assert sample.ttft_s and sum(sample.step_s) <= sample.wall_s
    # Slots are full most of the time: fewer steps than one slot would need, more than if all fit.
    decoded = sample.output_tokens - sample.items
    assert decoded / 3 <= len(sample.step_s) < decoded


def test_requests_may_come_while_others_run(dataset: str) -> None:
    engine = graph.load(request(dataset, engine="graph"), device_for("cpu"))
    prompts = [[1 + (7 * row + at) % 200 for at in range(3 + row)] for row in range(5)]
    lengths = [9, 4, 6, 1, 5]
    alone = [
        engine.generate(engine.prepare([prompt]), Generation(output_tokens=n))().tokens[0]
        for prompt, n in zip(prompts, lengths, strict=True)
    ]
    texts: dict[int, list[int]] = {}
    steps: list[int] = []
    last = threading.Event()

    def on_step(numbers: list[int]) -> None:
        steps.extend(numbers)
        if len(steps) == 4:  # two texts are on their way
            batch.submit(prompts[2], lengths[2])
            batch.submit(prompts[3], lengths[3])

    def on_end(text: Text) -> None:
        texts[text.number] = text.tokens
        if len(texts) == 4:
            last.set()

    generation = ContinuousGeneration(slots=2, output_tokens=9, on_step=on_step)
    batch = ContinuousBatch(engine.generator, generation, positions=20, on_end=on_end)
    with pytest.raises(ValueError, match="20 positions"):
        batch.submit([1] * 15, 6)
    for prompt, n in zip(prompts[:2], lengths[:2], strict=True):
        batch.submit(prompt, n)
    thread = threading.Thread(target=batch.run)
    thread.start()
    assert last.wait(60)
    batch.submit(prompts[4], lengths[4])  # nothing runs any more
    batch.close()
    thread.join(60)
    assert not thread.is_alive()
    assert [texts[number] for number in range(5)] == alone
    assert len(steps) == sum(lengths)
    with pytest.raises(ValueError, match="no more requests"):
        batch.submit([1], 1)
