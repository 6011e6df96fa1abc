"""Configuration of a model by name, as far as it is known without loading or asking anything.

Rules of a plan read sizes from it; what is not known here, the job itself will find.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads.base import WorkloadError
from workloads.models import smollm2
from workloads.models.catalog import MADE, SMOLLM2, find_model
from workloads.models.checkpoint_files import read_config
from workloads.models.hub import fetched_config

#: Names for the number of positions: transformers', ChatGLM's own, GPT-2's and its kin's.
_POSITIONS = ("max_position_embeddings", "seq_length", "n_positions")


def known_config(model: str) -> dict[str, Any] | None:
    """config.json of a model, or the part of it that is known; None where nothing is."""
    try:
        entry = find_model(model, weights=False)
        if entry.name in MADE:
            maker = importlib.import_module(MADE[entry.name])
            made: dict[str, Any] = maker.config() if hasattr(maker, "config") else {}
            return made
        if entry.name == SMOLLM2:  # a GGUF file, and no config.json yet
            return {"max_position_embeddings": smollm2.POSITIONS}
        directory = Path(entry.location)
        return read_config(directory) if os.path.isdir(directory) else fetched_config(entry.name)
    except (WorkloadError, OSError):
        return None


def positions_of(config: Mapping[str, Any]) -> int | None:
    """The most tokens that a model takes at once, of an encoder-decoder on either side; None where
    its config does not say. T5's ``n_positions`` are no limit: its positions are relative."""
    names = _POSITIONS[:1] if config.get("is_encoder_decoder") else _POSITIONS
    found = next((config[name] for name in names if config.get(name)), None)
    return found if isinstance(found, int) else None


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model of this config.json knows."""
    found = config.get("vocab_size") or config.get("padded_vocab_size")
    return found if isinstance(found, int) else None
