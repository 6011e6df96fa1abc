"""Samples as rows of tensors: padded, or packed so that they share a row and do not meet.

Packed samples are told apart by ``position_ids`` that start at 0 again. transformers makes a mask
of that for the attention of its newer models; others would let a sample attend to its neighbour
without a word, so ``check_packing`` tries it out on the very model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workloads.base import Unsupported
from workloads.training.samples import NOT_LEARNED, Learnable, SampleFormat, TrainingSample

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device
    from workloads.techniques.base import Inputs


def in_order(samples: Sequence[Learnable], batch: int) -> list[list[int]]:
    """Batches of positions in the order of the data; the last is filled from the start."""
    return _in_batches(range(len(samples)), batch)


def uniform_length(samples: Sequence[Learnable], batch: int, window: int) -> list[list[int]]:
    """Batches of like length: sorted by length within windows of ``window`` batches each.

    The batches of a window come in a fixed order that is not by length, so that training does not
    drift from short to long.
    """
    batches = []
    for start in range(0, len(samples), batch * window):
        here = range(start, min(start + batch * window, len(samples)))
        by_length = sorted(here, key=lambda position: (samples[position].tokens, position))
        batches += _spread(_in_batches(by_length, batch))
    return batches


def _spread(batches: list[list[int]]) -> list[list[int]]:
    """A fixed order in which neighbours lie far apart: long strides through the list."""
    count = len(batches)
    stride = next(n for n in range(max(count * 5 // 8, 1), count + 2) if _coprime(n, count))
    return [batches[index * stride % count] for index in range(count)]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def _in_batches(positions: Sequence[int], batch: int) -> list[list[int]]:
    whole = -(-len(positions) // batch) * batch
    filled = [positions[index % len(positions)] for index in range(whole)]
    return [filled[start : start + batch] for start in range(0, whole, batch)]


def collate(samples: Sequence[TrainingSample], form: SampleFormat, fixed: bool = False) -> Inputs:
    """One sample a row, padded to the longest, or to ``max_length`` if that is ``fixed``."""
    return padded(samples, form.pad_token_id, form.max_length if fixed else None)


def pack(samples: Sequence[TrainingSample], form: SampleFormat, *, one_row: bool = False) -> Inputs:
    """Several samples a row, of at most ``max_length``; or all in ``one_row``, which pads nothing.

    How long that is matters to nobody who attends to each sample by itself: places start again.
    """
    length = sum(len(sample.ids) for sample in samples) if one_row else form.max_length
    return packed(samples, form.pad_token_id, length)


def padded(
    samples: Sequence[TrainingSample], pad_token_id: int, to_length: int | None = None
) -> Inputs:
    """One sample a row, filled up on the right to ``to_length``, else to the longest sample."""
    length = to_length or max(len(sample.ids) for sample in samples)
    return _inputs(
        ids=[_filled(sample.ids, length, pad_token_id) for sample in samples],
        labels=[_filled(sample.labels, length, NOT_LEARNED) for sample in samples],
        mask=[_filled([1] * len(sample.ids), length, 0) for sample in samples],
    )


def packed(samples: Sequence[TrainingSample], pad_token_id: int, max_length: int) -> Inputs:
    """As few rows as first-fit finds, of at most ``max_length``; filling is a sample of its own."""
    bins = first_fit([len(sample.ids) for sample in samples], max_length)
    length = max(sum(len(samples[index].ids) for index in held) for held in bins)
    ids, labels, positions = [], [], []
    for held in bins:
        row = [samples[index] for index in held]
        rest = length - sum(len(sample.ids) for sample in row)
        ids.append([*_chain(s.ids for s in row), *[pad_token_id] * rest])
        labels.append([*_chain(s.labels for s in row), *[NOT_LEARNED] * rest])
        positions.append([*_chain(range(len(s.ids)) for s in row), *range(rest)])
    return _inputs(ids=ids, labels=labels, positions=positions)


def longest_row(
    samples: Sequence[Learnable], batches: Sequence[Sequence[int]], cards: int, parts: int
) -> int:
    """Tokens of the longest row of all steps and cards, where a card cuts its share of a batch into
    so many parts, a row each."""
    longest = 0
    for batch in batches:
        for card in range(cards):
            tokens = [samples[index].tokens for index in batch[card::cards]]
            size = len(tokens) // parts
            rows = (sum(tokens[start : start + size]) for start in range(0, len(tokens), size))
            longest = max(longest, *rows)
    return longest


def filled_up(inputs: Inputs, length: int, pad_token_id: int) -> Inputs:
    """A row of packed samples with one more sample at its end, of which nothing is learned; one
    that is longer stays as it is, as a row of what is held out may be."""
    import torch
    from torch.nn.functional import pad

    assert inputs.position_ids is not None
    rest = max(0, length - inputs.input_ids.shape[1])
    places = torch.arange(rest).expand(len(inputs.position_ids), -1)
    return replace(
        inputs,
        input_ids=pad(inputs.input_ids, (0, rest), value=pad_token_id),
        labels=pad(inputs.labels, (0, rest), value=NOT_LEARNED),
        position_ids=torch.cat([inputs.position_ids, places], 1),
    )


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Positions of ``lengths`` in bins of ``capacity``: the longest first, each into the first
    bin with room. A length beyond the capacity gets a bin of its own."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = next((n for n, free in enumerate(room) if free >= lengths[index]), None)
        if fitting is None:
            bins.append([])
            room.append(capacity)
            fitting = len(bins) - 1
        bins[fitting].append(index)
        room[fitting] -= lengths[index]
    return bins


def _chain(parts: Iterable[Iterable[int]]) -> list[int]:
    return [value for part in parts for value in part]


def _filled(values: Sequence[int], length: int, filling: int) -> list[int]:
    return [*values, *[filling] * (length - len(values))]


def _inputs(
    ids: list[list[int]],
    labels: list[list[int]],
    mask: list[list[int]] | None = None,
    positions: list[list[int]] | None = None,
) -> Inputs:
    import torch

    from workloads.techniques.base import Inputs

    def tensor(values: list[list[int]] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.long)

    return Inputs(
        input_ids=torch.tensor(ids, dtype=torch.long),
        labels=torch.tensor(labels, dtype=torch.long),
        attention_mask=tensor(mask),
        position_ids=tensor(positions),
    )


def check_packing(model: Any, device: Device) -> None:
    """Make sure that packed samples do not attend to each other in this model.

    Raises:
        Unsupported: a sample's logits change with the sample before it.
    """
    import torch

    ids = torch.tensor([[3, 4, 5, 6, 7, 8], [8, 7, 9, 6, 7, 8]], device=device.torch_device)
    positions = torch.tensor([[0, 1, 2] * 2] * 2, device=device.torch_device)
    was_training = model.training
    model.eval()  # dropout would make a difference of its own
    with torch.no_grad():
        # One row at a time, so that both are computed in the same way.
        first, second = (
            model(
                input_ids=ids[row : row + 1],
                position_ids=positions[row : row + 1],
                use_cache=False,
            ).logits[:, 3:]
            for row in (0, 1)
        )
    model.train(was_training)
    if not torch.equal(first, second):
        raise Unsupported(
            f"{type(model).__name__} lets packed samples attend to each other: with position_ids "
            "alone it does not tell them apart; use another padding"
        )
