"""The seam of tasks: what one kind of model needs to be loaded, trained and measured.

A *workload* is what a grid names; a *task* is a kind of model. ``workloads/tasks/NAME.py`` declares
one in its ``SPEC``: which checkpoints it takes (decided in the plan, from the JSON file of their
directory), how a model is loaded, how examples become samples and samples a batch, the loss, and
the metrics. A workload names the tasks that it can run (``WorkloadSpec.tasks``); the plan
pairs it with the task that takes the checkpoint, or refuses the job.

Functions are named, not imported, since the plan asks and has no torch:

    load           (source, **arguments) -> model
    encode         (examples, count, SampleFormat) -> Encoded
    collate        (samples, SampleFormat, fixed=False) -> Inputs; ``fixed``: all of one shape
    loss           (logits, labels, kept) -> summed loss of the labelled positions

A task may have further ones:

    make           (source, vocabulary, **arguments) -> model with fresh weights
    arrange        (samples, global batch) -> positions of each batch's samples; else in order
    draw           (samples, SampleFormat, step) -> a global batch as that step meets it (masked)
    generator      (request, positions, parts) -> GenerationEngine of transformers' generate
    flops          (model, samples) -> operations of a training step, per token

Techniques ask for some, which a task may lack; a job that needs one ends UNSUPPORTED:

    positions      (labels) -> the positions whose logits the loss needs
    aligned        (logits, labels, kept) -> logits of positions, and the label of each
    pack           (samples, SampleFormat, one_row=False) -> Inputs of several samples a row
    check_packing  (model, device); raises if packed samples meet in this model
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workloads.errors import Unsupported
from workloads.metrics.base import Metric

if TYPE_CHECKING:
    from workloads.models.checkpoint_kind import CheckpointKind
    from workloads.refusal import Asked, Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One kind of model."""

    name: str
    title: str  # what people call such a model, with its article: "a causal language model"
    #: Endings of the class that a checkpoint was saved from.
    architectures: tuple[str, ...] = ()
    #: Families that are of this kind where the class does not say.
    model_types: frozenset[str] = frozenset()
    encoder_decoder: bool = False  # whether it takes what says that it is an encoder and a decoder
    pipeline: bool = False  # whether it takes directories of several models
    functions: Mapping[str, str] = field(default_factory=dict)  # "module:function", by name
    metrics: tuple[Metric, ...] = ()
    #: Settings of workloads that only tasks which name them have; refused with others' models.
    settings: frozenset[str] = frozenset()
    #: What speaks against a job with such a model; pure, the plan asks.
    refuse: Callable[[Asked, CheckpointKind], Iterable[Refusal]] | None = None
    #: Arguments of every forward pass in training, beside a batch's tensors.
    forward: Mapping[str, Any] = field(default_factory=dict)

    def takes(self, kind: CheckpointKind) -> bool:
        """Tell if a checkpoint is of this kind."""
        if kind.pipeline or self.pipeline:
            return kind.pipeline and self.pipeline
        if kind.encoder_decoder or self.encoder_decoder:
            if kind.encoder_decoder:
                return self.encoder_decoder
            return kind.model_type in self.model_types
        return kind.architecture.endswith(self.architectures)

    def function(self, name: str) -> Any:
        """One of its functions; this imports it.

        Raises:
            Unsupported: it has none of this name.
        """
        if name not in self.functions:
            raise Unsupported(f"{self.title} has no function '{name}' in this version")
        module, _, function = self.functions[name].partition(":")
        return getattr(importlib.import_module(module), function)
