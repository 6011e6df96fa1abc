"""Greedy generation in which a row that has ended is given the next prompt.

In a static batch everyone waits for the longest: rows that have ended are computed on, new prompts
wait outside, and prompts are padded to the longest of them. Here a row ends when its text ends; as
soon as some are free, the next prompts are read in one pass without padding, and decoding goes
on with all rows. When no prompts are left the batch shrinks. Each text is what it would be alone,
up to rounding: in fp32 the same tokens.

Decisions (which prompts when, which row) are those of ``_Plan``, which knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from workloads.errors import Unsupported
from workloads.generation import rows

#: Prompts are read together up to so many tokens: products gain nothing from more, and their
#: activations take memory.
PREFILL_TOKENS = 512


@dataclass(slots=True, kw_only=True)
class Text:
    """One prompt on its way."""

    index: int  # of the prompt
    prompt_tokens: int
    ids: list[int] = field(default_factory=list)  # generated

    @property
    def length(self) -> int:
        """Tokens whose keys and values are kept: the last one is not fed back yet."""
        return self.prompt_tokens + len(self.ids) - 1


class _Plan:
    """Which prompts wait, and which row holds which text; rows in use are the first ones."""

    def __init__(self, lengths: Sequence[int], row_count: int) -> None:
        self._lengths = lengths
        self._rows = row_count
        self._next = 0
        self.running: list[Text] = []
        # Reading a prompt costs a pass of its own; a few rows may wait for company.
        self._together = max(1, row_count // 8)

    @property
    def over(self) -> bool:
        return not self.running and self._next == len(self._lengths)

    def admit(self) -> list[Text]:
        """The prompts to read now, if any; they take the rows behind those in use."""
        free = self._rows - len(self.running)
        waiting = len(self._lengths) - self._next
        if not waiting or free < min(self._together, waiting):
            return []
        admitted: list[Text] = []
        tokens = 0
        while self._next < len(self._lengths) and len(admitted) < free:
            length = self._lengths[self._next]
            if admitted and tokens + length > PREFILL_TOKENS:
                break
            admitted.append(Text(index=self._next, prompt_tokens=length))
            tokens += length
            self._next += 1
        self.running += admitted
        return admitted

    def remove(self, ended: Callable[[Text], bool]) -> list[tuple[int, int]]:
        """Take ended texts out; the moves (from row, to row) that close the gaps, in order."""
        moves = []
        for row in range(len(self.running)):
            while self.running and ended(self.running[-1]):
                self.running.pop()
            if row < len(self.running) and ended(self.running[row]):
                self.running[row] = self.running.pop()
                moves.append((len(self.running), row))
        return moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Refilled:
    """What came out, by prompt."""

    tokens: list[list[int]]  # up to and including the end of sequence
    computed_tokens: int  # positions the device worked on


def check_model(model: Any) -> None:
    """Whether rows can stand in for the model's own cache.

    Raises:
        Unsupported: they cannot; says why.
    """
    config = model.config
    if not getattr(model, "_supports_attention_backend", False):
        raise Unsupported(
            f"batching continuous: {type(model).__name__} does not call transformers' attention "
            "interface; use batching static or sorted"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None):
        named = ", ".join(sorted(kinds)) or "sliding_window"
        raise Unsupported(f"batching continuous: the model has layers of another kind ({named})")


@contextmanager
def attention_over_rows(model: Any) -> Iterator[None]:
    """The model's layers call ``rows.attend``; afterwards what they called before."""
    from transformers import AttentionInterface

    AttentionInterface.register(rows.NAME, rows.attend)
    before = model.config._attn_implementation
    model.config._attn_implementation = rows.NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    row_count: int,
    output_tokens: int,
    end_token_ids: Set[int],
    on_admit: Callable[[Sequence[int]], None],
    on_step: Callable[[Sequence[int]], None],
) -> Refilled:
    """Generate greedily for all prompts, in at most ``row_count`` rows at a time.

    Args:
        model: of a kind that ``check_model`` takes, within ``attention_over_rows``.
        prompts: ids of each.
        row_count: texts that are worked on at a time.
        output_tokens: most of each text.
        end_token_ids: what ends a text; empty for none.
        on_admit: told which prompts are about to be read.
        on_step: told for which prompts a token has been made, when it is on the host.
    """
    plan = _Plan([len(prompt) for prompt in prompts], min(row_count, len(prompts)))
    cache = rows.Rows(
        min(row_count, len(prompts)), max(len(prompt) for prompt in prompts) + output_tokens
    )
    device = next(model.parameters()).device
    found: list[list[int]] = [[] for _ in prompts]
    computed = 0

    def ended(text: Text) -> bool:
        return len(text.ids) >= output_tokens or text.ids[-1] in end_token_ids

    def take(texts: Sequence[Text], tokens: Sequence[int]) -> None:
        for text, token in zip(texts, tokens, strict=True):
            text.ids.append(token)
            found[text.index] = text.ids
        on_step([text.index for text in texts])
        in_use = len(plan.running)
        for source, target in plan.remove(ended):
            cache.move(source, target, plan.running[target].length)
        for row in range(len(plan.running), in_use):
            cache.clear(row)

    while not plan.over:
        if admitted := plan.admit():
            on_admit([text.index for text in admitted])
            first_row = len(plan.running) - len(admitted)
            take(admitted, _read(model, cache, prompts, admitted, first_row, device))
            computed += sum(text.prompt_tokens for text in admitted)
        elif plan.running:
            texts = tuple(plan.running)
            computed += len(texts)
            take(texts, _decode(model, cache, texts, device))
    return Refilled(tokens=found, computed_tokens=computed)


def _read(
    model: Any,
    cache: rows.Rows,
    prompts: Sequence[Sequence[int]],
    admitted: Sequence[Text],
    first_row: int,
    device: torch.device,
) -> list[int]:
    """Read whole prompts; the first token of each."""
    ids: list[int] = []
    positions: list[int] = []
    segments = []
    for offset, text in enumerate(admitted):
        segments.append(rows.Segment(first_row + offset, len(ids), text.prompt_tokens))
        ids += prompts[text.index]
        positions += range(text.prompt_tokens)
    last = torch.tensor([s.start + s.length - 1 for s in segments], device=device)
    logits = model(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        logits_to_keep=last,
        rows_pass=rows.Prefill(cache, segments),
    ).logits
    return [int(token) for token in logits[0].argmax(-1).tolist()]


def _decode(model: Any, cache: rows.Rows, texts: Sequence[Text], device: torch.device) -> list[int]:
    """One more token of each text."""
    lengths = torch.tensor([text.length for text in texts], device=device)
    longest = max(text.length for text in texts) + 1
    beyond = torch.arange(longest, device=device)[None, :] > lengths[:, None]
    mask = torch.zeros(beyond.shape, dtype=model.dtype, device=device)
    mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None, :]
    logits = model(
        input_ids=torch.tensor([[text.ids[-1]] for text in texts], device=device),
        position_ids=lengths[:, None],
        use_cache=False,
        rows_pass=rows.Decode(cache, len(texts), lengths, longest, mask),
    ).logits
    return [int(token) for token in logits[:, -1].argmax(-1).tolist()]
