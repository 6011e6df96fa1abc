"""Loss on the dataset's answers: quality of a generating model that needs no other model.

What a fast path writes can be held against the plain path's texts (``quality.py``); where a dataset
has answers, its loss on them says how likely it finds those. The prompt is read as in generation
and its tokens count for nothing; the answer's tokens and the one that ends it count alike. It is
what transformers calls the loss of a text whose prompt has no labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from workloads.base import JobContext, OutOfMemory, Unsupported
from workloads.data.shapes import Example
from workloads.engines.base import GenerationEngine

#: Answers that are read, the first of the dataset.
ANSWERS = 8

#: Figures by name, and what a row says beside them.
Told = tuple[dict[str, float], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Answered:
    """Ids of a prompt and of its answer, the token that ends it included."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def answered(engine: GenerationEngine, examples: Sequence[Example]) -> list[Answered]:
    """The first examples that have an answer, each once, as far as the model has positions."""
    found = (one for one in examples if one.summary.strip())
    texts = []
    for one in islice(found, ANSWERS):
        prompt = engine.encode(one.content, one.earlier)
        answer = engine.encode_answer(one.content, one.summary, one.earlier)
        limits = [each for each in (engine.context_length, engine.window) if each is not None]
        if room := min(limits, default=None):
            answer = answer[: max(room - len(prompt), 0)]
        if answer:
            texts.append(Answered(tuple(prompt), tuple(answer)))
    return texts


def loss_of(engine: GenerationEngine, texts: Sequence[Answered]) -> float:
    """Mean negative log-probability of the answers' tokens, in nats."""
    import torch

    summed = 0.0
    for text, logits in zip(texts, engine.answer_logits(texts), strict=True):
        labels = torch.tensor(text.answer)
        summed += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return summed / sum(len(text.answer) for text in texts)


def beside_speed(
    engine: GenerationEngine, examples: Sequence[Example], context: JobContext
) -> Told:
    """The figure of a loaded engine, and what the row says of it. All ranks read the answers, since
    cards that split a model have to read together."""
    texts = answered(engine, examples)
    if not texts:
        return {}, {"answer_loss": "not known: no example of the dataset has an answer with room"}
    try:
        loss = loss_of(engine, texts)
    except Exception as error:
        found = context.device.classify(error)
        if not isinstance(found, (Unsupported, OutOfMemory)):
            raise
        return {}, {"answer_loss": f"not known: {type(found).__name__}: {found}"}
    tokens = sum(len(text.answer) for text in texts)
    return {"answer_loss": loss}, {"answer_loss": f"of {tokens:,} tokens of {len(texts)} answers"}
