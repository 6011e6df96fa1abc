"""Samples of sequence-to-sequence models: a source for the encoder, a target to learn.

The decoder's input is the target shifted right behind its start token. Both sides are padded on the
right; padding has no label (``--ignore_pad_token_for_loss True`` of transformers'
``run_summarization.py``; the published T5 run had False). Default lengths are that script's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, JobDescription, Refusal, Unsupported
from workloads.registry import CheckpointKind
from workloads.settings import WorkloadParameters, work
from workloads.training.data import NOT_LEARNED, Encoded, SampleFormat, rows_of
from workloads.training.parallel.layout import model_parallel_size

if TYPE_CHECKING:
    from workloads.data.shapes import Example
    from workloads.training.technique import Inputs

#: Default maximum of tokens of a source and of a target.
SOURCE_TOKENS, TARGET_TOKENS = 1024, 128


class SourceParameters(WorkloadParameters):
    """Settings of what the encoder reads."""

    source_prefix: str = work(
        "",
        loads=True,
        description="Text before every source, such as `summarize: ` (the blank at its end "
        "counts), which T5's own checkpoints want. For sequence-to-sequence models.",
    )
    max_source_length: int | None = work(
        None,
        loads=True,
        length=True,
        ge=2,
        description="Most tokens of a source; a longer one is cut at its end. For "
        f"sequence-to-sequence models. Left out: {SOURCE_TOKENS}.",
    )


class Seq2SeqParameters(SourceParameters):
    """Settings of pairs of texts that a model learns from."""

    max_target_length: int | None = work(
        None,
        length=True,
        ge=2,
        description="Most tokens of a target (a summary); a longer one is cut at its end. For "
        f"sequence-to-sequence models. Left out: {TARGET_TOKENS}.",
    )


def source_length(parameters: Mapping[str, Any]) -> int:
    """Most tokens of a source."""
    return int(parameters.get("max_source_length") or SOURCE_TOKENS)


def target_length(parameters: Mapping[str, Any]) -> int:
    """Most tokens of a target."""
    return int(parameters.get("max_target_length") or TARGET_TOKENS)


#: Families whose feed-forward layers overflow in fp16.
_OVERFLOWING = frozenset({"t5", "mt5", "umt5", "longt5"})

#: Technique settings that need samples of one row.
_OF_ONE_ROW = {
    ("padding", "packing"): "packs a source and its target into no row",
    **dict.fromkeys(
        [("logits", "learned"), ("logits", "chunked")],
        "computes the logits of all positions of a target, and learns them all",
    ),
    ("batching", "continuous"): "generates in static batches",
}


def refuse(job: JobDescription, kind: CheckpointKind) -> Iterator[Refusal]:
    """Objections to a job with such a model."""
    autocast = job.parameters.get("autocast")
    if kind.model_type in _OVERFLOWING and "fp16" in (job.precision, autocast):
        name = "precision" if job.precision == "fp16" else "autocast"
        yield Refusal(
            setting=name,
            reason="T5's feed-forward layers overflow in fp16",
            hint=f"write {name}: bf16",
            unsupported=True,
        )
    if job.parameters.get("max_length", 512) != 512:
        yield Refusal(
            setting="max_length",
            reason="a sequence-to-sequence model has a length of the source and one of the target",
            hint="write max_source_length and max_target_length",
        )
    for (name, value), reason in _OF_ONE_ROW.items():
        if job.parameters.get(name) == value:
            yield Refusal(
                setting=name,
                reason=f"this version {reason} (sequence-to-sequence models)",
                hint=f"leave {name} out",
                unsupported=True,
            )
    if model_parallel_size(job.parameters, job.cards) > 1:
        whole = job.parameters.get("strategy") in ("tensor-parallel", "pipeline")
        yield Refusal(
            setting="strategy" if whole else "tensor_parallel",
            reason="this version splits decoder-only models over cards",
            hint="strategy ddp, fsdp2 and zero0 to zero3 train sequence-to-sequence models on many "
            "cards",
            unsupported=True,
        )


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
    """The first ``count`` examples with a summary, each once, as pairs."""
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
    prefix_note = repr(prefix) if prefix else "none"
    name = form.source.entry.name.rstrip("/").rpartition("/")[2].lower()
    if not prefix and name in PREFIXED:
        prefix_note = f"none, although {name} was trained with one such as 'summarize: '"
    chosen = usable[:count]
    tokenize = partial(form.tokenizer, truncation=True, return_attention_mask=False)
    texts = [source_text(example, prefix) for example in chosen]
    sources = tokenize(texts, max_length=longest)["input_ids"]
    summaries = [example.summary for example in chosen]
    targets = tokenize(text_target=summaries, max_length=longest_target)["input_ids"]
    return Encoded(
        samples=[Pair(tuple(s), tuple(t)) for s, t in zip(sources, targets, strict=True)],
        details={
            "source_tokens": f"at most {longest}",
            "target_tokens": f"at most {longest_target}",
            "source_prefix": prefix_note,
            "pairs": str(len(chosen)),
            "empty_summaries": f"{len(examples) - len(usable)} of {len(examples)} left out",
        },
    )


def begin_token_id(config: Any) -> int:
    """Return the start token of targets; Unsupported without one (e.g. a language token)."""
    begin = getattr(config, "decoder_start_token_id", None)
    if not isinstance(begin, int):
        raise Unsupported(
            f"{getattr(config, 'model_type', 'this model')} has no decoder_start_token_id in its "
            "config; this version trains models whose targets begin with one token"
        )
    return begin


def collate(samples: Sequence[Pair], form: SampleFormat, fixed: bool = False) -> Inputs:
    """One pair a row, sides padded to the longest, or to the maximum if ``fixed``."""
    from workloads.training.technique import Inputs

    source, target = source_length(form.parameters), target_length(form.parameters)
    if not fixed:
        source = max(len(sample.source) for sample in samples)
        target = max(len(sample.target) for sample in samples)
    begin, pad = begin_token_id(form.config), form.pad_token_id

    given = [[begin, *sample.target[:-1]] for sample in samples]
    return Inputs(
        input_ids=rows_of([sample.source for sample in samples], source, pad),
        attention_mask=rows_of([[1] * len(sample.source) for sample in samples], source, 0),
        decoder_input_ids=rows_of(given, target, pad),
        labels=rows_of([sample.target for sample in samples], target, NOT_LEARNED),
    )


def layer_share(samples: Sequence[Pair]) -> Callable[[str], float]:
    """Layer name -> share of tokens: sources for encoder and cross-attention, else targets."""
    source = sum(len(sample.source) for sample in samples)
    target = sum(len(sample.target) for sample in samples)
    share = source / (source + target)

    def of_layer(name: str) -> float:
        of_source = "encoder." in f"{name}." and ".decoder." not in f".{name}."
        return share if of_source or any(part in name for part in _CROSS) else 1 - share

    return of_layer
