"""Samples of sequence-to-sequence models: a source that is read, a target that is learned.

The encoder reads the source, with its prefix, in both directions. The decoder is given the target
one place later, behind the token that a text begins with, and learns the target at each place. A
batch pads both sides on the right; padding carries no label, so it is never learned
(``--ignore_pad_token_for_loss True`` of transformers' script; the published T5 run had False).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, Unsupported
from workloads.seq2seq_settings import source_length, target_length
from workloads.training.flops import train_flops_per_token
from workloads.training.samples import NOT_LEARNED, Encoded, SampleFormat

if TYPE_CHECKING:
    import torch

    from workloads.data.examples import Example
    from workloads.techniques.base import Inputs

#: T5's own checkpoints were trained with a prefix for each task.
PREFIXED = ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b")

#: Layers of a decoder that work on the encoder's positions, by what their names hold.
_CROSS = ("EncDecAttention.k", "EncDecAttention.v", "encoder_attn.k_proj", "encoder_attn.v_proj")


@dataclass(frozen=True, slots=True)
class Pair:
    """Ids of one sample, each side with the token that ends it."""

    source: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of both sides."""
        return len(self.source) + len(self.target)

    @property
    def learned_tokens(self) -> int:
        """Number of positions that have a label: all of the target."""
        return len(self.target)


def source_text(example: Example, prefix: str) -> str:
    """The text that the encoder reads."""
    return prefix + "\n\n".join([*(turn.text for turn in example.earlier), example.content])


def encode(examples: Sequence[Example], count: int, form: SampleFormat) -> Encoded:
    """The first ``count`` examples with a summary, each once, as pairs.

    Raises:
        BadConfiguration: no example has a summary; the model has too few positions.
        Unsupported: the model does not say how a target begins.
    """
    longest, longest_target = source_length(form.parameters), target_length(form.parameters)
    form.check_length("max_source_length", longest)
    form.check_length("max_target_length", longest_target)
    begin_token_id(form.config)
    usable = [example for example in examples if example.summary.strip()]
    if not usable:
        raise BadConfiguration(
            f"none of the dataset's {len(examples)} examples has a summary to learn; expected are "
            "article and highlights, or content and summary"
        )
    prefix = str(form.parameters.get("source_prefix") or "")
    chosen = usable[:count]
    sources = form.tokenizer(
        [source_text(example, prefix) for example in chosen],
        max_length=longest,
        truncation=True,
        return_attention_mask=False,
    )["input_ids"]
    targets = form.tokenizer(
        text_target=[example.summary for example in chosen],
        max_length=longest_target,
        truncation=True,
        return_attention_mask=False,
    )["input_ids"]
    return Encoded(
        samples=[Pair(tuple(s), tuple(t)) for s, t in zip(sources, targets, strict=True)],
        details={
            "source_tokens": f"at most {longest}",
            "target_tokens": f"at most {longest_target}",
            "source_prefix": _prefix_note(form.source.entry.name, prefix),
            "pairs": str(len(chosen)),
            "empty_summaries": f"{len(examples) - len(usable)} of {len(examples)} left out",
        },
    )


def _prefix_note(model: str, prefix: str) -> str:
    name = model.rstrip("/").rpartition("/")[2].lower()
    if not prefix and name in PREFIXED:
        return f"none, although {name} was trained with one such as 'summarize: '"
    return repr(prefix) if prefix else "none"


def begin_token_id(config: Any) -> int:
    """The token before the first of every target.

    Raises:
        Unsupported: the model has none; its targets begin otherwise, with a language say.
    """
    found = getattr(config, "decoder_start_token_id", None)
    if not isinstance(found, int):
        raise Unsupported(
            f"{getattr(config, 'model_type', 'this model')} has no decoder_start_token_id in its "
            "config; this version trains models whose targets begin with one token"
        )
    return found


def collate(samples: Sequence[Pair], form: SampleFormat, fixed: bool = False) -> Inputs:
    """One pair a row, both sides padded to the longest, or to all there may be if ``fixed``."""
    import torch

    from workloads.techniques.base import Inputs

    source, target = source_length(form.parameters), target_length(form.parameters)
    if not fixed:
        source = max(len(sample.source) for sample in samples)
        target = max(len(sample.target) for sample in samples)
    begin, pad = begin_token_id(form.config), form.pad_token_id

    def rows(values: Sequence[Sequence[int]], length: int, filling: int) -> torch.Tensor:
        filled = [[*row, *[filling] * (length - len(row))] for row in values]
        return torch.tensor(filled, dtype=torch.long)

    return Inputs(
        input_ids=rows([sample.source for sample in samples], source, pad),
        attention_mask=rows([[1] * len(sample.source) for sample in samples], source, 0),
        decoder_input_ids=rows([[begin, *sample.target[:-1]] for sample in samples], target, pad),
        labels=rows([sample.target for sample in samples], target, NOT_LEARNED),
    )


def flops(model: Any, samples: Sequence[Pair]) -> float:
    """Operations of a training step for each token, both sides counted: layers of the encoder, and
    those that read its output, work on sources, all others on targets."""
    source = sum(len(sample.source) for sample in samples)
    target = sum(len(sample.target) for sample in samples)
    share = source / (source + target)

    def of_layer(name: str) -> float:
        of_source = "encoder." in f"{name}." and ".decoder." not in f".{name}."
        return share if of_source or any(part in name for part in _CROSS) else 1 - share

    return train_flops_per_token(model, of_layer)
