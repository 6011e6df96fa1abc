"""The kind of a checkpoint, as the JSON file in its directory tells: nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Names the parts of a pipeline of several models; each part has a directory of its own.
PIPELINE_INDEX = "model_index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKind:
    """Classes and family that a checkpoint declares."""

    architecture: str  # the class that it was saved from, or the pipeline's
    model_type: str = ""  # transformers' name of the family
    encoder_decoder: bool = False
    pipeline: bool = False  # a directory of several models


def kind_of(config: Mapping[str, Any]) -> CheckpointKind:
    """The kind of a checkpoint with this config.json."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else config.get("model_type")
    return CheckpointKind(
        architecture=str(first or "unknown"),
        model_type=str(config.get("model_type") or ""),
        encoder_decoder=config.get("is_encoder_decoder") is True,
    )


def is_pipeline_index(content: Mapping[str, Any]) -> bool:
    """Tell a model_index.json from a config.json: of its parts it names libraries and classes."""
    return "_class_name" in content and isinstance(content.get("scheduler"), list)


def kind_of_pipeline(index: Mapping[str, Any]) -> CheckpointKind:
    """The kind of a pipeline with this model_index.json."""
    return CheckpointKind(architecture=str(index.get("_class_name") or "unknown"), pipeline=True)
