"""Rules of splitting a model over cards: which models, how many, which settings. Pure, no torch.

Attention is split by heads, so the number of cards has to divide the heads, and with grouped
queries the key/value heads too: ChatGLM3 has two of those, so two cards are its limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workloads.base import JobDescription, Refusal, WorkloadError
from workloads.models.chatglm3 import from_original_config, is_original
from workloads.models.known_config import known_config
from workloads.precision import quantized

#: What has to be divided, by its name in a model's config.
_SIZES = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key/value heads",
    "intermediate_size": "channels between the layers of an MLP",
}


def split_problem(config: Mapping[str, Any], cards: int) -> str:
    """Reason why a model cannot be split over so many cards; empty when it can."""
    for name, meaning in _SIZES.items():
        size = config.get(name)
        if isinstance(size, int) and size % cards:
            return f"the model's {size} {meaning} cannot be split over {cards} cards"
    return ""


def model_config(name: str) -> Mapping[str, Any] | None:
    """A model's config.json by name; None where it cannot be had without loading anything."""
    read = known_config(name)
    try:
        return from_original_config(read) if read and is_original(read) else read
    except WorkloadError:
        return None


def tensor_refusals(asked: JobDescription, tensor: int, setting: str) -> Iterator[Refusal]:
    """Objections to splitting matrices over ``tensor`` of the job's cards.

    ``setting`` is the parameter that asks for it.
    """
    if asked.cards % tensor:
        divisors = [n for n in range(1, asked.cards + 1) if asked.cards % n == 0]
        yield Refusal(
            setting=setting,
            reason=f"{asked.cards} cards cannot be divided into groups of {tensor}",
            hint=f"{asked.cards} cards can be in groups of {', '.join(map(str, divisors))}",
        )
        return
    if tensor == 1:
        return
    config = model_config(asked.model)
    problem = split_problem(config, tensor) if config is not None else ""
    if problem and config is not None:
        possible = [n for n in range(1, tensor) if not split_problem(config, n)]
        yield Refusal(
            setting=setting,
            reason=problem,
            hint=f"it can be split over {', '.join(map(str, possible))}",
        )
    if quantized(asked.precision):
        yield Refusal(
            setting="precision",
            reason=f"this version splits plain weights over cards, not {asked.precision} ones",
            unsupported=True,
        )


def generation_refusals(asked: JobDescription) -> tuple[Refusal, ...]:
    """Objections to splitting the matrices of a job of text generation."""
    tensor = asked.parameters.get("tensor_parallel")
    if tensor is None:
        return ()
    if asked.cards == 1 and tensor > 1:
        reason = "the job has one card, so nothing can be split"
        hint = "write cards: 2 or more, or leave tensor_parallel out"
        return (Refusal(setting="tensor_parallel", reason=reason, hint=hint),)
    return tuple(tensor_refusals(asked, tensor, "tensor_parallel"))
