"""From a model's name to a directory that ``transformers`` loads, and the loaders.

Embedded models are built once per node into the cache (``workloads/data/cache.py``); directories
and hub snapshots are used in place, unless the engine needs ChatGLM3's other layout
(``conversion.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, DataMissing, Unsupported
from workloads.data.cache import cached_directory
from workloads.inspection.checkpoints import read_config, weight_files
from workloads.inspection.headers import OldFormat, describe_tensors, read_header
from workloads.inspection.look import LOADERS
from workloads.inspection.process import stage
from workloads.inspection.tokenizers import has_tokenizer
from workloads.inspection.weights import objection, reported, require_loaded
from workloads.models import encryption, hub, precision, random_weights, rules
from workloads.models.catalog import MADE, SMOLLM2, ModelEntry, find_model
from workloads.models.chatglm3.conversion import in_layout, tokenizer_directory
from workloads.models.chatglm3.layout import Layout
from workloads.models.embedded import smollm2
from workloads.models.rules import VARIABLE, allowed
from workloads.registry import TASKS
from workloads.util import files
from workloads.util.processes import variables

#: Arguments of ``from_pretrained`` for a report on tensors, other shapes included.
_REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def permitted(models: Sequence[str]) -> AbstractContextManager[None]:
    """Allow exactly these models to run code during the block; none: keep the environment's."""
    return variables({VARIABLE: os.pathsep.join(models)} if models else {})


def passed_on() -> Mapping[str, str]:
    """Return this process's permission, for the environment of remote processes."""
    return {VARIABLE: os.environ.get(VARIABLE, "")}


def remote_code_refusal(model: str, error: Exception) -> BadConfiguration | None:
    """Return the error to raise instead if ``error`` is about the model's own code."""
    if "trust_remote_code" not in str(error):
        return None
    return BadConfiguration(
        f"{model} brings Python code of its own, which is not run unless the model is named: "
        f"read that code, then give `nightgrid run --remote-code {model}`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model ready to load: ``from_pretrained(source.path, …)`` of the task's class."""

    path: str
    tokenizer_path: str
    random_weights: bool
    entry: ModelEntry
    remote_code: bool = False  # the model's own Python files may run
    opening: encryption.Opening | None = None  # for encrypted weights

    def metrics(self) -> dict[str, float]:
        """Return metrics of its loading, by name."""
        return {"decryption_s": self.opening.seconds} if self.opening is not None else {}


def open_model(
    name: str, *, layout: Layout = "native", weights: bool = True, protected: bool = False
) -> ModelSource:
    """Return a model's source, built, fetched or converted if needed. Safe across processes.

    ``name`` and ``weights`` as in ``catalog.find_model``. ``layout`` is the engine's, of ChatGLM3's
    two. ``protected`` accepts encrypted weights, which only this module's functions load. Raises
    DataMissing if it cannot be had, BadConfiguration without such a layout or without its key.
    """
    entry = find_model(name, weights=weights)
    own_code = allowed(name)
    path = Path(entry.location)
    if entry.kind == "hub" and entry.location == name:
        path = hub.download(name, with_code=own_code, pipeline=entry.checkpoint.pipeline)
    elif entry.kind == "random":
        shape = path
        path = cached_directory(
            random_weights.cache_key(shape), lambda to: random_weights.build(shape, to)
        )
    elif name in MADE:
        maker = importlib.import_module(MADE[name])
        path = cached_directory(maker.cache_key(), maker.build)
    elif name == SMOLLM2:
        file = path
        path = cached_directory(smollm2.cache_key(file), lambda to: smollm2.build(file, to))
    opening = encryption.opening_for(path)
    if opening is not None and not protected:
        raise BadConfiguration(
            f"the weights in {path} are protected, and are read here in the clear only"
        )
    tokenizer_path = path
    if not entry.checkpoint.pipeline:
        path = in_layout(path, layout)
        tokenizer_path = tokenizer_directory(path)
    return ModelSource(
        path=str(path),
        tokenizer_path=str(tokenizer_path),
        random_weights=entry.random_weights,
        entry=entry,
        remote_code=own_code,
        opening=opening,
    )


def load_config(source: ModelSource) -> Any:
    """Load the config with transformers. Raises DataMissing if it cannot be read, BadConfiguration
    if it needs the model's own code, which is not allowed."""
    from transformers import AutoConfig

    with _reading(source, f"transformers cannot read the model in {source.path}"):
        return AutoConfig.from_pretrained(source.path, trust_remote_code=source.remote_code)


@contextlib.contextmanager
def _reading(source: ModelSource, failure: str) -> Iterator[None]:
    """Translate errors of reading arbitrary files, which make libraries raise anything."""
    try:
        yield
    except Exception as error:
        if refusal := remote_code_refusal(source.entry.name, error):
            raise refusal from error
        text = " ".join((str(error) or repr(error)).split())  # the reason may be on line two
        raise DataMissing(f"{failure}: {text:.300}") from error


def make_masked_model(source: ModelSource, vocabulary: int, **arguments: Any) -> Any:
    """Build a masked language model for ``vocabulary``, with fresh weights, equal everywhere."""
    import torch
    from transformers import AutoModelForMaskedLM

    config = load_config(source)
    config.vocab_size = max(int(config.vocab_size), vocabulary)
    keyword = next((name for name in arguments if name.endswith("dtype")), None)
    dtype = arguments[keyword] if keyword else torch.float32
    if keyword:  # drawn in fp32: every precision starts from the same numbers
        arguments[keyword] = torch.float32
    torch.manual_seed(0)
    with _explained(source, "masked-lm", arguments):
        arguments = _with_attention(AutoModelForMaskedLM, config, arguments)
        model = AutoModelForMaskedLM.from_config(config, **arguments)
    model.new_weights = ("all",)
    return model.to(dtype)


def _load(task: str, source: ModelSource, **arguments: Any) -> Any:
    """Load a task's model; ``arguments`` are those of ``from_pretrained``.

    Its ``new_weights`` names weights that the checkpoint lacks and the task declares new. Raises
    DataMissing for a missing or truncated file or tensor, BadConfiguration for another kind of
    model or its own code without permission, Unsupported without this attention or a package.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # a worker's log is no terminal
    loader, new = getattr(transformers, LOADERS[task].name), LOADERS[task].new
    with _explained(source, task, arguments):
        if arguments.get("attn_implementation") == "sdpa":
            config = arguments.get("config") or load_config(source)
            arguments = _with_attention(loader, config, arguments)
        if source.entry.kind == "random":
            return random_weights.make(loader, **{"config": load_config(source), **arguments})
        if source.opening is not None:
            return _from_memory(loader, source, source.opening, arguments, new)
        if "quantization_config" not in arguments:  # else the device's
            config = read_config(Path(source.path))
            reading = rules.reading_arguments(config, source.path, on_host=_on_host(arguments))
            arguments = {**arguments, **reading}
        for file in weight_files(Path(source.path)):
            with contextlib.suppress(OldFormat):  # names the file that a library would not
                read_header(file)
        with _quiet():
            loaded, report = loader.from_pretrained(
                source.path,
                trust_remote_code=source.remote_code,
                weights_only=True,
                **_REPORTED,
                **arguments,
            )
        whole = _whole(loaded, report, source, new, own_config="config" not in arguments)
        dtype = arguments.get(precision.dtype_keyword())
        if dtype is not None and precision.quantized_already(whole.config):
            precision.align_dtypes(whole, dtype)
        return precision.restore_ranges(whole, Path(source.path))


load_causal_model = partial(_load, "causal-lm")
load_seq2seq_model = partial(_load, "seq2seq-lm")
load_masked_model = partial(_load, "masked-lm")


def _with_attention(loader: Any, config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with eager attention in the place of sdpa, for classes that have no sdpa."""
    chosen = loader._model_mapping.get(type(config), None)
    classes = chosen if isinstance(chosen, (list, tuple)) else (chosen,)
    lacking = chosen is not None and not any(getattr(c, "_supports_sdpa", True) for c in classes)
    if arguments.get("attn_implementation") != "sdpa" or not lacking:
        return dict(arguments)
    return {**arguments, "attn_implementation": "eager"}


def _whole(
    model: Any,
    report: Mapping[str, Any],
    source: ModelSource,
    new: Sequence[str],
    own_config: bool = False,
) -> Any:
    """Return a model of which every tensor was read; ``new_weights`` names those that are new."""
    names = model.state_dict()
    found = reported(report, len(names), new)
    quantised = getattr(model.config, "quantization_config", None) is not None
    later = getattr(model.config, "num_nextn_predict_layers", 0)
    strict = own_config and not quantised and not later
    model.new_weights = require_loaded(found, source.path, names if strict else ())
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' report out of the log: it is read, and what matters is in the row."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def with_new_weights(source: ModelSource, new: Sequence[str]) -> ModelSource:
    """Return the source of a model with ``new`` weights, which are random weights."""
    return replace(source, random_weights=source.random_weights or bool(new))


@contextlib.contextmanager
def _explained(source: ModelSource, task: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataMissing(f"cannot load the model in {source.path}: {error}") from error
    except ImportError as error:  # of a quantised checkpoint
        raise Unsupported(f"the model in {source.path} needs a package: {error}") from error
    except ValueError as error:
        if refusal := remote_code_refusal(source.entry.name, error):
            raise refusal from error
        text = str(error)
        if "scaled_dot_product_attention" in text or "attn_implementation" in text:
            attention = arguments.get("attn_implementation")
            raise Unsupported(f"this model has no attention '{attention}': {text}") from error
        if "Unrecognized configuration class" in text:
            raise BadConfiguration(
                f"the model in {source.path} is not {TASKS[task].title}: {text.splitlines()[0]}"
            ) from error
        raise _unloadable(source, error) from error
    except Exception as error:
        # transformers 5 checks types of a configuration's values.
        if isinstance(error, _ODD) or type(error).__name__.startswith("StrictDataclass"):
            raise _unloadable(source, error) from error
        raise


#: Errors of libraries over odd configurations.
_ODD = (LookupError, AttributeError, TypeError, ArithmeticError, AssertionError)


def _unloadable(source: ModelSource, error: Exception) -> BadConfiguration:
    text = " ".join((str(error) or "no reason").split())
    return BadConfiguration(
        f"transformers cannot load the model in {source.path} by its configurations: "
        f"{type(error).__name__}: {text:.300}"
    )


def _on_host(arguments: Mapping[str, Any]) -> bool:
    """Tell if a model is loaded to the default tensors' device."""
    import torch

    host = torch.empty(0).device
    placed = (arguments.get("device_map") or {"": host}).values()
    return all(torch.device(device) == host for device in placed)


def _from_memory(
    loader: Any,
    source: ModelSource,
    opening: encryption.Opening,
    arguments: Mapping[str, Any],
    new: Sequence[str],
) -> Any:
    import torch
    from transformers import GenerationConfig

    config = arguments.get("config") or load_config(source)
    with torch.device("meta"):  # automatic classes do not accept tensors
        chosen = type(loader.from_config(config, trust_remote_code=source.remote_code))
    weights = opening.state_dict(Path(source.path))
    model, report = chosen.from_pretrained(
        None,
        trust_remote_code=source.remote_code,
        **_REPORTED,
        **{**arguments, "config": config, "state_dict": weights},
    )
    model = _whole(model, report, source, new)
    ends = Path(source.path) / "generation_config.json"
    if ends.is_file():  # not read by from_pretrained without a path
        model.generation_config = GenerationConfig.from_dict(json.loads(files.read_text(ends)))
    return model


def compare_without_values(directory: str, loader: str, new: Sequence[str]) -> tuple[str, str]:
    """Return why a checkpoint is refused, and the remedy, by transformers' own report over tensors
    without storage; for the look's process."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    stage(str(Path(directory) / "config.json"))
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    tensors = describe_tensors(weight_files(Path(directory)))
    with torch.device("meta"):
        try:
            made = getattr(transformers, loader).from_config(config, trust_remote_code=False)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            reason = f"transformers has no {loader} of the model type {config.model_type!r}"
            return reason, "name a model of a type that it has"
        chosen = type(made)
        state = {n: torch.empty(t.shape, dtype=torch.float16) for n, t in tensors.items()}
    options = {"config": config, "state_dict": state, "device_map": {"": "meta"}}
    model, report = chosen.from_pretrained(None, trust_remote_code=False, **_REPORTED, **options)
    names = model.state_dict()
    strict = not getattr(config, "num_nextn_predict_layers", 0)
    return objection(reported(report, len(names), new), names if strict else ())


def check_attention(model: Any, attention: str) -> str:
    """Return for the row what computes attention: as asked, or eager where a class has no sdpa;
    BadConfiguration if another one runs."""
    running = getattr(model.config, "_attn_implementation", None)
    if running == attention:
        return attention
    if (attention, running) == ("sdpa", "eager") and not getattr(model, "_supports_sdpa", True):
        import transformers

        name = type(model).__name__
        return f"eager: {name} has no sdpa in transformers {transformers.__version__}"
    raise BadConfiguration(f"asked for attention '{attention}', the model runs '{running}'")


def load_tokenizer(source: ModelSource, **arguments: Any) -> Any:
    """Load the tokenizer, with left padding and a pad token; raises as ``load_config``."""
    from transformers import AutoTokenizer

    if not has_tokenizer(Path(source.tokenizer_path)):
        lacking = rules.no_tokenizer(source.tokenizer_path, source.entry.checkpoint)
        raise DataMissing(f"{lacking[0]}; {lacking[1]}")
    with _reading(source, f"the tokenizer in {source.tokenizer_path} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(
            source.tokenizer_path, trust_remote_code=source.remote_code, **arguments
        )
    tokenizer.padding_side = "left"  # decoders continue at the right
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
