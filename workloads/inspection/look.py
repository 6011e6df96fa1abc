"""The look at a model's directory before a job: what is wrong with which file, and the remedy.

``look`` runs ``examine`` in a process with limits and remembers the answer while the directory is
unchanged. Tensors are compared by the table of families; those of other families by the library
itself, over a model without storage, in a process with torch (cached on disk); else when it loads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from workloads.base import WorkloadError
from workloads.data.cache import cached_directory
from workloads.inspection import checkpoints, configuration, process, tokenizers, weights
from workloads.inspection.checkpoints import Objection, UnusableFile, read_object
from workloads.inspection.families import FAMILIES, needed
from workloads.inspection.headers import OldFormat, describe_tensors
from workloads.util import files

#: Limits of the process with torch, whose import alone takes seconds and up to a GB.
_TORCH_SECONDS, _TORCH_BYTES = 60.0, 4 * 2**30
#: Reads configurations and headers, and renders templates.
READER = process.Bounded()
#: Makes models without storage, with transformers.
LIBRARY = process.Bounded(seconds=_TORCH_SECONDS, memory_bytes=_TORCH_BYTES, of="DATA")
#: Compares tensors by transformers' own report.
COMPARE = "workloads.models.loading:compare_without_values"
_ANSWER = "answer.json"
#: End of the reason that leaves a comparison to the library.
_LIBRARYS = "is in no table of shapes"
#: Stands in remedies for the model's name, which only the job knows.
MODEL = "MODEL"


class Loader(NamedTuple):
    """The loading of a task's models as transformers does it."""

    name: str  # of its automatic class
    kind: str  # of the models, in a description
    new: tuple[str, ...] = ()  # patterns of tensors made anew where a checkpoint lacks them


LOADERS = {
    "causal-lm": Loader("AutoModelForCausalLM", "decoder"),
    "masked-lm": Loader("AutoModelForMaskedLM", "encoder", weights.NEW_HEADS),
    "seq2seq-lm": Loader("AutoModelForSeq2SeqLM", "encoder and decoder"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The outcome of a look."""

    objections: tuple[Objection, ...] = ()
    #: Why tensors were not compared; "" if they were.
    later: str = ""


def look(
    directory: Path,
    *,
    task: str,
    read_weights: bool = True,
    chats: bool = False,
    code_allowed: bool = False,
    own_loader: bool = False,
) -> Look:
    """Look at the directory of a model or a pipeline; remembered while its files are the same.

    ``task`` is the one that loads it. ``read_weights`` is false where a job makes fresh ones; jobs
    that are ``chats`` render its template; ``code_allowed`` lets its own Python code run; with an
    ``own_loader`` the engine has its own list of families.
    """
    options = (task, read_weights, chats, code_allowed, own_loader)
    return _look(str(directory.absolute()), state_of(directory), options)


def state_of(directory: Path) -> str:
    """Return a key that changes when a file of a directory, or of a pipeline's part, does."""
    stats = []
    for place in (directory, *sorted(directory.glob("*/"))):
        try:
            with os.scandir(place) as entries:
                statuses = [(entry.path, entry.stat()) for entry in entries]
            stats += [(path, status.st_size, status.st_mtime_ns) for path, status in statuses]
        except OSError as error:
            stats.append((str(place), 0, error.errno or 0))
    return hashlib.sha256(repr(sorted(stats)).encode()).hexdigest()


@lru_cache(maxsize=256)
def _look(directory: str, _state: str, options: tuple[Any, ...]) -> Look:
    try:
        answer = READER.call(f"{__name__}:examine", directory=directory, options=options)
        found = [Objection(*objection) for objection in answer["objections"]]
        later = answer["later"]
        if later and not found and options[1]:
            found, later = _by_library(directory, options, later)
    except process.Ended as error:
        return Look(objections=(Objection("", str(error), "is it from a source that you trust?"),))
    return Look(objections=tuple(found), later=later)


def examine(directory: str, options: Sequence[Any]) -> dict[str, Any]:
    """Return objections and whether tensors remain to be compared; for ``look``'s process."""
    task, read_weights, chats, code_allowed, own_loader = options
    place = Path(directory)
    pipeline = read_object(place / checkpoints.PIPELINE_INDEX) is not None
    # Fresh weights get as many rows as the tokenizer has tokens.
    texts = _texts(place, task, chats, code_allowed or own_loader, sized=read_weights)
    found = _parts(place) if pipeline else list(texts)
    later = ""
    if read_weights and not pipeline and not checkpoints.protected_files(place):
        try:
            objections, later = _tensors(place, task)
            found += objections
        except WorkloadError as error:
            found.append(_objection(error))
    return {"objections": list(dict.fromkeys(found)), "later": later}


def _objection(error: WorkloadError) -> Objection:
    return error.objection if isinstance(error, UnusableFile) else Objection("", str(error))


#: Names of a part's weights, or with .index.json of their shards, for which diffusers looks.
_PART_WEIGHTS = (
    "diffusion_pytorch_model.safetensors",
    "model.safetensors",
    "diffusion_pytorch_model.bin",
    "pytorch_model.bin",
)


def _parts(place: Path) -> list[Objection]:
    """Objections to a pipeline's parts: those that are missing, configurations that cannot be read,
    and the weight files of the variant that is loaded."""
    found = []
    for part, named in (read_object(place / checkpoints.PIPELINE_INDEX) or {}).items():
        if part == "safety_checker" or not isinstance(named, list) or not all(named):
            continue  # not loaded; a setting; left out by its makers
        held = {file.name.removesuffix(".index.json") for file in (place / part).glob("*")}
        if not held:
            reason = f"{checkpoints.PIPELINE_INDEX} names it, and it is not there"
            found.append(Objection(f"{part}/", reason, checkpoints.FETCH))
        elif "config.json" in held and held.isdisjoint(_PART_WEIGHTS):
            reason = "it has no weights under a name for which diffusers looks"
            hint = "fetch those without a variant, such as fp16, in their names"
            found.append(Objection(f"{part}/", reason, hint))
    for file in sorted(place.glob("*/*config.json")):
        try:
            read_object(file)
        except UnusableFile as error:
            found.append(_of_part(file, error))
    for config in sorted(place.glob("*/config.json")):
        for name in _PART_WEIGHTS[:2]:
            single = config.parent / name
            index = config.parent / f"{name}.index.json"
            try:
                shards = checkpoints.index_shards(index) if index.is_file() else [name]
                listed = [config.parent / shard for shard in shards]
                if index.is_file() or single.is_file():
                    describe_tensors(listed)
            except WorkloadError as error:
                found.append(_of_part(single, error))
    return found


def _of_part(file: Path, error: WorkloadError) -> Objection:
    objection = _objection(error)
    named = objection.file and f"{file.parent.name}/{objection.file}"
    return objection._replace(file=named)


def _texts(
    place: Path, task: str, chats: bool, code_allowed: bool, *, sized: bool
) -> Iterator[Objection]:
    contents: dict[str, dict[str, Any]] = {}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        try:
            contents[name] = read_object(place / name) or {}
        except UnusableFile as error:
            yield error.objection
    if (config := contents.get("config.json")) is None:
        return
    yield from configuration.objections(config)
    original = config.get("model_type") == "chatglm"  # converted before anything loads it
    if not code_allowed and not original and (task in LOADERS or config.get("auto_map")):
        settings = contents.get("tokenizer_config.json", {})
        if reason := configuration.own_code(config):
            yield Objection("config.json", reason, _code_hint(config))
        elif reason := configuration.own_tokenizer(settings):
            yield Objection("tokenizer_config.json", reason, _code_hint(settings))
    rows = configuration.vocabulary_size(config)
    yield from configuration.generation_objections(contents.get("generation_config.json", {}), rows)
    yield from tokenizers.objections(place, rows if sized else None)
    if chats and task == "causal-lm" and not original:
        yield from tokenizers.template_objections(place)


def _code_hint(config: Mapping[str, Any]) -> str:
    if config.get("auto_map"):
        return f"read that code, then give `nightgrid run --remote-code {MODEL}`"
    return "correct model_type, or install the release of transformers that knows it"


def _tensors(place: Path, task: str) -> tuple[list[Objection], str]:
    """Compare the weights with the table; return objections, and why it could not ("": it did)."""
    if ambiguous := checkpoints.unclear_weights(place):
        return [Objection("", ambiguous, "remove the one that is not the model's")], ""
    for index in place.glob("*.index.json"):
        if "metadata" not in (read_object(index) or {}):
            reason = "it has no 'metadata', without which transformers does not load it"
            return [Objection(index.name, reason, 'write "metadata": {} into it')], ""
    try:
        stored = describe_tensors(checkpoints.weight_files(place))
    except OldFormat:
        return [], "its weights are in the format before torch 1.6"
    config = checkpoints.read_config(place)
    kind, described = config.get("model_type"), needed(config)
    if kind == "chatglm":
        return [], "it is converted first"
    if described is None and kind in FAMILIES:
        return [], "its config.json leaves out sizes"
    if described is None or task not in LOADERS:
        return [], f"{configuration.shown(kind)} {_LIBRARYS}"
    packed = bool(config.get("quantization_config"))
    found = weights.difference(
        described.shapes,
        {name: info.shape for name, info in stored.items()},
        prefix=described.prefix,
        tied=described.tied,
        packed=packed,
        new=LOADERS[task].new,
    )
    whole = {name: (info.dtype, info.shape) for name, info in stored.items()}
    if not packed and (cut := weights.without_fractions(whole)):
        reason = f"{cut[0]} holds whole numbers, and its config.json has no quantization_config"
        return [Objection("", reason, "fetch the weights, or its quantization_config, again")], ""
    strict = not packed and not config.get("num_nextn_predict_layers")
    reason, hint = weights.objection(found, described.shapes if strict else ())
    return ([Objection("", reason, hint)] if reason else []), ""


# ---------------------------------------------------------------- families without a table


def _by_library(directory: str, options: Sequence[Any], later: str) -> tuple[list[Objection], str]:
    """Compare by transformers itself, from a cache on disk or in a process with torch."""
    place = Path(directory)
    task, _, _, code_allowed, own_loader = options
    installed = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    first = next(iter(checkpoints.weight_files(place)))
    if task not in LOADERS or not installed or code_allowed or own_loader:
        return [], later
    quantised = checkpoints.read_config(place).get("quantization_config")
    if quantised or first.suffix != ".safetensors" or _LIBRARYS not in later:
        return [], later
    loader, _, new = LOADERS[task]
    versions = f"{version('torch')} {version('transformers')}"
    key = hashlib.sha256(f"{directory} {state_of(place)} {loader} {versions}".encode()).hexdigest()

    def build(to: Path) -> None:
        answer = LIBRARY.call(COMPARE, directory=directory, loader=loader, new=new)
        (to / _ANSWER).write_text(json.dumps(answer), encoding="utf-8")

    try:
        cached = cached_directory(f"look-{key[:32]}", build)
    except process.Ended as error:
        return [], f"{later}, and transformers' own model of it could not be made ({error})"
    reason, hint = json.loads(files.read_text(cached / _ANSWER))
    return ([Objection("", reason, hint)] if reason else []), ""
