"""Rules of jobs with sequence-to-sequence models. Pure, without torch: the plan asks."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.base import JobDescription, Refusal
from workloads.models.checkpoint_kind import CheckpointKind
from workloads.parallel.layout import model_parallel_size

#: Families whose feed-forward layers overflow in fp16.
_OVERFLOWING = frozenset({"t5", "mt5", "umt5", "longt5"})

#: Values of techniques for which samples have to be one row of tokens.
_OF_ONE_ROW = {
    ("padding", "packing"): "packs a source and its target into no row",
    **dict.fromkeys(
        [("logits", "learned"), ("logits", "chunked")],
        "computes the logits of all positions of a target, and learns them all",
    ),
    ("batching", "continuous"): "generates in static batches",
}


def refuse(asked: JobDescription, kind: CheckpointKind) -> Iterator[Refusal]:
    """Objections to a job with such a model."""
    yield from _fp16(asked, kind)
    if asked.parameters.get("max_length", 512) != 512:
        yield Refusal(
            setting="max_length",
            reason="a sequence-to-sequence model has a length of the source and one of the target",
            hint="write max_source_length and max_target_length",
        )
    for (setting, value), reason in _OF_ONE_ROW.items():
        if asked.parameters.get(setting) == value:
            yield Refusal(
                setting=setting,
                reason=f"this version {reason} (sequence-to-sequence models)",
                hint=f"leave {setting} out",
                unsupported=True,
            )
    if model_parallel_size(asked.parameters, asked.cards) > 1:
        whole = asked.parameters.get("strategy") in ("tensor-parallel", "pipeline")
        yield Refusal(
            setting="strategy" if whole else "tensor_parallel",
            reason="this version splits decoder-only models over cards",
            hint="strategy ddp, fsdp2 and zero0 to zero3 train sequence-to-sequence models on many "
            "cards",
            unsupported=True,
        )


def _fp16(asked: JobDescription, kind: CheckpointKind) -> Iterator[Refusal]:
    if kind.model_type not in _OVERFLOWING:
        return
    for setting, value in (
        ("precision", asked.precision),
        ("autocast", asked.parameters.get("autocast")),
    ):
        if value == "fp16":
            yield Refusal(
                setting=setting,
                reason="T5's feed-forward layers overflow in fp16",
                hint=f"write {setting}: bf16",
                unsupported=True,
            )
