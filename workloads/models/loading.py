"""From a model's name to a directory that ``transformers`` loads, and what it loads from there.

Embedded models are made once per node into the cache (``workloads/data/cache.py``); directories and
hub snapshots are used where they lie, unless the engine wants ChatGLM3 in its other layout
(``conversion.py``). Nobody downstream needs to know which it was.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, DataMissing, Unsupported
from workloads.data.cache import cached_directory
from workloads.models import encryption, hub, precision, random_weights, rules
from workloads.models.catalog import MADE, SMOLLM2, ModelEntry, find_model
from workloads.models.chatglm3.conversion import in_layout, tokenizer_directory
from workloads.models.chatglm3.layout import Layout
from workloads.models.checkpoints import has_tokenizer, no_tokenizer, read_config
from workloads.models.embedded import smollm2
from workloads.util import files
from workloads.util.processes import variables

# Code that comes with a model is never run unless whoever starts the run has named that model.
#
# A checkpoint may bring Python files, and transformers would run them on every card with the rights
# of the worker. A grid file travels and is only data, so it cannot allow that. The command line
# can: ``nightgrid run --remote-code MODEL``, once for each model, which reaches the workers as a
# variable of their environment.

#: Names of models that may run their own code, separated like the directories of PATH.
VARIABLE = "NIGHTGRID_REMOTE_CODE"


def allowed(model: str) -> bool:
    """Tell if the model of this name, as the job writes it, may run its own code here. A repository
    of the hub that is named stands for the commit that the plan found, too."""
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    repository, revision = hub.split(model)
    pinned = hub.COMMIT.fullmatch(revision) and not os.path.exists(model)
    return model in named or bool(pinned and repository in named)


@contextlib.contextmanager
def permitted(models: Sequence[str]) -> Iterator[None]:
    """Let exactly these models run their code during the block, here and in processes that are
    given what ``passed_on`` says; with none named, what the environment says stays in force."""
    with variables({VARIABLE: os.pathsep.join(models)} if models else {}):
        yield


def passed_on() -> Mapping[str, str]:
    """This process's permission, for the environment of a process that it starts elsewhere."""
    return {VARIABLE: os.environ.get(VARIABLE, "")}


def remote_code_refusal(model: str, error: Exception) -> BadConfiguration | None:
    """The error to raise instead, if ``error`` says that the model wants to run its own code."""
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
    remote_code: bool = False  # whether the model's own Python files may be run
    opening: encryption.Opening | None = None  # of protected weights

    def metrics(self) -> dict[str, float]:
        """Figures of its loading, by the name of the metric."""
        return {"decryption_s": self.opening.seconds} if self.opening is not None else {}


def open_model(
    name: str, *, layout: Layout = "native", weights: bool = True, protected: bool = False
) -> ModelSource:
    """Make sure the model's directory exists, building, fetching or converting it if need be.

    Safe when several processes of a node ask at once.

    Args:
        name: as in ``catalog.find_model``.
        layout: which of ChatGLM3's two layouts the engine loads; other models have one.
        weights: whether it must have them; else a configuration is enough.
        protected: whether the caller loads protected weights, by this module's functions.

    Raises:
        DataMissing: there is no such model, or it cannot be made or fetched.
        BadConfiguration: it is a ChatGLM that cannot be had in that layout, or protected and
            not to be opened here.
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
    """The model's config, as transformers reads it.

    Raises:
        DataMissing: it is not there, or nothing that transformers knows.
        BadConfiguration: it would run code that comes with the model, which was not allowed.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.path, trust_remote_code=source.remote_code)
    except (OSError, ValueError) as error:
        if refusal := remote_code_refusal(source.entry.name, error):
            raise refusal from error
        raise DataMissing(
            f"transformers cannot read the model in {source.path}: {error}"
        ) from error


def load_causal_model(source: ModelSource, **arguments: Any) -> Any:
    """The model, a causal language model, with its weights.

    Args:
        source: the model.
        arguments: of ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        DataMissing: a file is missing or cut short.
        BadConfiguration: it is no causal language model, or would run code that comes with it,
            which was not allowed.
        Unsupported: it has not the attention asked for, or a package is missing.
    """
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, "a causal language model", source, arguments)


def load_seq2seq_model(source: ModelSource, **arguments: Any) -> Any:
    """The model, a sequence-to-sequence model, with its weights; see ``load_causal_model``."""
    from transformers import AutoModelForSeq2SeqLM

    return _load(AutoModelForSeq2SeqLM, "a sequence-to-sequence model", source, arguments)


def load_masked_model(source: ModelSource, **arguments: Any) -> Any:
    """The model, a masked language model, with its weights, and ``new_weights``: names of those
    that the checkpoint lacks; see ``load_causal_model``."""
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it lists what is new; the row says so
    try:
        with _explained(source, "a masked language model", arguments):
            model, report = AutoModelForMaskedLM.from_pretrained(
                source.path,
                trust_remote_code=source.remote_code,
                weights_only=True,
                output_loading_info=True,
                **arguments,
            )
    finally:
        logging.set_verbosity(before)
    model.new_weights = tuple(sorted(report["missing_keys"]))
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

    config = load_config(source)
    config.vocab_size = max(int(config.vocab_size), vocabulary)
    keyword = next((name for name in arguments if name.endswith("dtype")), None)
    dtype = arguments[keyword] if keyword else torch.float32
    if keyword:  # drawn in fp32, so that every precision starts from the same numbers
        arguments[keyword] = torch.float32
    torch.manual_seed(0)
    with _explained(source, "a masked language model", arguments):
        model = AutoModelForMaskedLM.from_config(config, **arguments)
    model.new_weights = ("all",)
    return model.to(dtype)


def _load(loader: Any, title: str, source: ModelSource, arguments: Mapping[str, Any]) -> Any:
    with _explained(source, title, arguments):
        if source.entry.kind == "random":
            return random_weights.make(loader, **{"config": load_config(source), **arguments})
        if source.opening is not None:
            return _from_memory(loader, source, source.opening, arguments)
        if "quantization_config" not in arguments:  # else a device has its own way
            config = read_config(Path(source.path))
            reading = rules.reading_arguments(config, source.path, on_host=_on_host(arguments))
            arguments = {**arguments, **reading}
        loaded = loader.from_pretrained(
            source.path, trust_remote_code=source.remote_code, weights_only=True, **arguments
        )
        return precision.restore_ranges(loaded, Path(source.path))


@contextlib.contextmanager
def _explained(source: ModelSource, title: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Say what transformers' errors mean for a model that is loaded as ``title``."""
    try:
        yield
    except OSError as error:
        raise DataMissing(f"cannot load the model in {source.path}: {error}") from error
    except ImportError as error:  # a quantised checkpoint names its library
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
                f"the model in {source.path} is not {title}: {text.splitlines()[0]}"
            ) from error
        raise


def _on_host(arguments: Mapping[str, Any]) -> bool:
    """Tell if a model is loaded where plain tensors lie."""
    import torch

    host = torch.empty(0).device
    placed = (arguments.get("device_map") or {"": host}).values()
    return all(torch.device(device) == host for device in placed)


def _from_memory(
    loader: Any, source: ModelSource, opening: encryption.Opening, arguments: Mapping[str, Any]
) -> Any:
    import torch
    from transformers import GenerationConfig

    config = arguments.get("config") or load_config(source)
    with torch.device("meta"):  # of automatic classes only the class they stand for takes tensors
        chosen = type(loader.from_config(config, trust_remote_code=source.remote_code))
    weights = opening.state_dict(Path(source.path))
    model = chosen.from_pretrained(
        None,
        trust_remote_code=source.remote_code,
        **{**arguments, "config": config, "state_dict": weights},
    )
    ends = Path(source.path) / "generation_config.json"
    if ends.is_file():  # without a path it is not read
        model.generation_config = GenerationConfig.from_dict(json.loads(files.read_text(ends)))
    return model


def check_attention(model: Any, attention: str) -> None:
    """Make sure that a loaded model runs the attention that was asked for.

    Raises:
        Unsupported: its class has none of that name, and the library took another one.
        BadConfiguration: it has, and runs another one.
    """
    running = getattr(model.config, "_attn_implementation", None)
    if running == attention:
        return
    if attention == "sdpa" and not getattr(model, "_supports_sdpa", True):
        import transformers

        raise Unsupported(
            f"{type(model).__name__} has no sdpa in transformers {transformers.__version__}, which "
            f"took {running}; write attention: {running}"
        )
    raise BadConfiguration(f"asked for attention '{attention}', the model runs '{running}'")


def load_tokenizer(source: ModelSource, **arguments: Any) -> Any:
    """The model's tokenizer, padding on the left with a pad token that exists.

    Args:
        source: the model.
        arguments: of ``AutoTokenizer.from_pretrained``.

    Raises:
        DataMissing: the directory has no tokenizer.
        BadConfiguration: it would run code that comes with the model, which was not allowed.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(Path(source.tokenizer_path)):
        lacking = no_tokenizer(source.tokenizer_path, source.entry.checkpoint)
        raise DataMissing(f"{lacking[0]}; {lacking[1]}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.tokenizer_path, trust_remote_code=source.remote_code, **arguments
        )
    except Exception as error:  # files from anywhere make the library raise anything
        if refusal := remote_code_refusal(source.entry.name, error):
            raise refusal from error
        text = (str(error) or repr(error)).splitlines()[0]
        raise DataMissing(
            f"the tokenizer in {source.tokenizer_path} cannot be read: {text:.300}"
        ) from error
    tokenizer.padding_side = "left"  # a decoder continues at the right end
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
