"""Masked language models: how one is loaded, made with fresh weights, and what its files say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, DataMissing
from workloads.models.checkpoint_files import read_config

if TYPE_CHECKING:
    from workloads.models.loading import ModelSource

#: Families whose positions begin behind the padding token's.
_SHIFTED = frozenset({"roberta", "camembert", "xlm-roberta", "mpnet"})
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def usable_positions(config: Mapping[str, Any]) -> int | None:
    """The most tokens that a model takes at once, by its config; None where it does not say."""
    found = config.get("max_position_embeddings")
    if not isinstance(found, int):
        return None
    if config.get("model_type") not in _SHIFTED:
        return found
    return found - int(config.get("pad_token_id") or 0) - 1


def mask_token(directory: Path) -> str | None:
    """The mask token that a tokenizer's files name, "" if they name none; None where they lack."""
    told = False
    for name in _TOKENIZER_FILES:
        if not (directory / name).is_file():
            continue
        told = True
        token = _token(directory / name)
        if token:
            return token
    return "" if told else None


def _token(file: Path) -> str:
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("mask_token")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(found.get("content") or "") if isinstance(found, dict) else str(found or "")


def load_masked_model(source: ModelSource, **arguments: Any) -> Any:
    """The model with its weights, and ``new_weights``: names of those that the checkpoint lacks.

    Args:
        source: the model.
        arguments: of ``AutoModelForMaskedLM.from_pretrained``.

    Raises:
        DataMissing: a file is missing or cut short.
        BadConfiguration: transformers has no such class for it.
    """
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it lists what is new; the row says so
    try:
        model, told = AutoModelForMaskedLM.from_pretrained(
            source.path,
            trust_remote_code=source.remote_code,
            weights_only=True,
            output_loading_info=True,
            **arguments,
        )
    except OSError as error:
        raise DataMissing(f"cannot load the model in {source.path}: {error}") from error
    except ValueError as error:
        raise _no_class(source, error) from error
    finally:
        logging.set_verbosity(before)
    model.new_weights = tuple(sorted(told["missing_keys"]))
    return model


def make_masked_model(source: ModelSource, vocabulary: int, **arguments: Any) -> Any:
    """The model of a configuration with fresh weights, which are the same everywhere.

    Args:
        source: the model, of which only the configuration is read.
        vocabulary: of the tokenizer; where it is larger than the configuration's, so is the model.
        arguments: of ``AutoModelForMaskedLM.from_config``.

    Raises:
        DataMissing: there is no configuration.
        BadConfiguration: transformers has no such class for it.
    """
    import torch
    from transformers import AutoModelForMaskedLM

    from workloads.models.loading import load_config

    config = load_config(source)
    config.vocab_size = max(int(config.vocab_size), vocabulary)
    keyword = next((name for name in arguments if name.endswith("dtype")), None)
    dtype = arguments.pop(keyword) if keyword else torch.float32
    torch.manual_seed(0)
    try:
        # Drawn in fp32, so that every precision starts from the same numbers.
        model = AutoModelForMaskedLM.from_config(
            config, **arguments, **({keyword: torch.float32} if keyword else {})
        )
    except ValueError as error:
        raise _no_class(source, error) from error
    model.new_weights = ("all",)
    return model.to(dtype)


def _no_class(source: ModelSource, error: ValueError) -> Exception:
    text = str(error)
    if "Unrecognized configuration class" not in text:
        return error
    first = text.splitlines()[0]
    return BadConfiguration(f"the model in {source.path} is no masked language model: {first}")


def config_of(directory: Path) -> Mapping[str, Any] | None:
    """config.json of a directory; None where it cannot be read."""
    try:
        return read_config(directory)
    except DataMissing:
        return None
