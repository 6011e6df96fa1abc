"""Greedy decoding whose steps are passes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

#: Ids of the new positions [rows, new] -> logits of the last one [rows, vocabulary].
Step = Callable[[torch.Tensor], torch.Tensor]


def greedy(
    step: Step,
    ids: torch.Tensor,
    *,
    output_tokens: int,
    end_token_ids: Collection[int],
    pad_token_id: int,
    on_step: Callable[[], None],
    keep_logits: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tokens of each step [rows], and its logits where they are kept. Rows that have ended are
    padded; nothing is computed once all have."""
    ends = torch.tensor(sorted(end_token_ids), dtype=torch.long)
    ended = torch.zeros(len(ids), dtype=torch.bool)
    tokens: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for _ in range(output_tokens):
        found = step(ids)
        chosen = found.argmax(-1).cpu().masked_fill(ended, pad_token_id)
        tokens.append(chosen)
        if keep_logits:
            logits.append(found)
        on_step()
        ended |= torch.isin(chosen, ends)
        if bool(ended.all()):
            break
        ids = chosen[:, None]
    return tokens, logits
