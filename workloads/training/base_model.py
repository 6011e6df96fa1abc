"""The model that is trained, as loaded: weights, tokenizer, and what the loop needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workloads import precision as precisions
from workloads import registry, weights
from workloads.base import Unsupported
from workloads.models.loading import (
    ModelSource,
    load_config,
    load_tokenizer,
    open_model,
)
from workloads.registry import TaskSpec
from workloads.techniques.base import Loading
from workloads.training.samples import SampleFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A model on its card, before any method."""

    model: Any
    tokenizer: Any
    source: ModelSource
    pad_token_id: int
    context_length: int | None
    task: TaskSpec

    def format(self, parameters: Mapping[str, Any]) -> SampleFormat:
        """The way in which a job's examples become its samples."""
        return SampleFormat(
            tokenizer=self.tokenizer,
            source=self.source,
            config=self.model.config,
            parameters=parameters,
            pad_token_id=self.pad_token_id,
            context_length=self.context_length,
        )


def load_base(workload: str, name: str, precision: str, loading: Loading) -> BaseModel:
    """Load a model in ``precision`` with the arguments that method and techniques want.

    Raises:
        DataMissing: it is not there, or incomplete.
        BadConfiguration: the workload takes no such model.
        Unsupported: this card cannot do the precision, or the model not the attention.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a worker's log is no terminal
    device = loading.device
    lacking = device.lacks(precision)
    if lacking:
        raise Unsupported(f"{precision}: {lacking}")
    source = loading.source = open_model(name, weights=not loading.fresh, protected=True)
    task = registry.task_for(workload, source.entry)
    weights.check_shapes(load_config(source), precision, device.name)
    tokenizer = load_tokenizer(source, **loading.tokenizer_arguments)
    if loading.fresh:
        model = task.function("make")(source, len(tokenizer), **loading.model_arguments)
    else:
        model = task.function("load")(source, **loading.model_arguments)
    if "device_map" not in loading.model_arguments:
        model.to(device.torch_device)
    precisions.finish_loading(model, precision, device.name)
    for check in loading.checks:
        check(model, tokenizer)
    for change in loading.changes:
        model = change(model, tokenizer, task)
    if new := getattr(model, "new_weights", ()):
        loading.details["new_weights"] = ", ".join(new)
    pad = getattr(tokenizer, "pad_token_id", None)
    return BaseModel(
        model=model,
        tokenizer=tokenizer,
        source=source,
        pad_token_id=pad if isinstance(pad, int) else 0,
        context_length=getattr(model.config, "max_position_embeddings", None),
        task=task,
    )
