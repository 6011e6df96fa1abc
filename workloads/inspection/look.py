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
from pathlib import Path
from typing import Any

from workloads.base import WorkloadError
from workloads.data.cache import cache_root
from workloads.inspection import checkpoints, configuration, process, tokenizers, weights
from workloads.inspection.configuration import Objection
from workloads.inspection.families import FAMILIES, needed
from workloads.inspection.headers import NeedsTorch, describe_tensors
from workloads.util import files

#: Limits of the process with torch, whose import alone takes seconds and some hundred MB.
_TORCH_SECONDS, _TORCH_BYTES = 60.0, 4 * 2**30
#: Reads configurations and headers, and renders templates.
READER = process.Bounded()
_LIBRARY = process.Bounded(seconds=_TORCH_SECONDS, memory_bytes=_TORCH_BYTES, of="DATA")
#: End of the reason that leaves a comparison to the library.
_LIBRARYS = "is in no table of shapes"
#: Stands in remedies for the model's name, which only the job knows.
MODEL = "MODEL"
#: Task -> transformers' loader; the tensors that it makes anew where the checkpoint lacks them.
LOADERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "causal-lm": ("AutoModelForCausalLM", ()),
    "masked-lm": ("AutoModelForMaskedLM", weights.NEW_HEADS),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", ()),
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
    """Look at a model's directory; remembered while its files are the same.

    Args:
        task: name of the task that loads it.
        read_weights: false where a job makes fresh weights.
        chats: whether jobs render its chat template.
        code_allowed: whether its own Python code may run.
        own_loader: the engine has its own loader, and its own list of families.
    """
    options = (task, read_weights, chats, code_allowed, own_loader)
    return _look(str(directory.absolute()), _state(directory), options)


def _state(directory: Path) -> str:
    """Return a key that changes when a file of a directory does."""
    try:
        with os.scandir(directory) as entries:
            stats = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries)
    except OSError:
        return ""
    return hashlib.sha256(repr(stats).encode()).hexdigest()


@lru_cache(maxsize=256)
def _look(directory: str, _state: str, options: tuple[Any, ...]) -> Look:
    try:
        answer = READER.call(f"{__name__}:examine", directory=directory, options=options)
        found = [Objection(*objection) for objection in answer["objections"]]
        later = answer["later"]
        if later and not found and options[1]:
            objection, later = _by_library(directory, options, later)
            found += objection
    except process.Ended as error:
        return Look(objections=(Objection("", str(error), "is it from a source that you trust?"),))
    return Look(objections=tuple(found), later=later)


def examine(directory: str, options: Sequence[Any]) -> dict[str, Any]:
    """Return objections and whether tensors remain to be compared; for ``look``'s process."""
    task, read_weights, chats, code_allowed, own_loader = options
    place = Path(directory)
    if checkpoints.read_pipeline_index(place) is not None:
        return {"objections": list(_parts(place)), "later": ""}
    # Fresh weights get as many rows as the tokenizer has tokens.
    found = list(_texts(place, task, chats, code_allowed or own_loader, sized=read_weights))
    later = ""
    if read_weights and not checkpoints.protected_files(place):
        try:
            objections, later = _tensors(place, task)
            found += objections
        except WorkloadError as error:
            found.append(Objection("", str(error)))
        except tokenizers.Unusable as error:
            found.append(error.objection)
    return {"objections": list(dict.fromkeys(found)), "later": later}


def _parts(place: Path) -> Iterator[Objection]:
    """Objections to the weight files of a pipeline's models, of the variant that is loaded."""
    for config in sorted(place.glob("*/config.json")):
        names = [f"{stem}.safetensors" for stem in ("diffusion_pytorch_model", "model")]
        for file in [config.parent / name for name in names]:
            if file.is_file():
                process.stage(str(file))
                try:
                    describe_tensors([file])
                except WorkloadError as error:
                    yield Objection("", str(error))


def _texts(
    place: Path, task: str, chats: bool, code_allowed: bool, *, sized: bool
) -> Iterator[Objection]:
    """Objections to configurations, tokenizer and chat template."""
    try:
        config = tokenizers.read_object(place, "config.json", files.SMALL_BYTES) or {}
    except tokenizers.Unusable as error:
        yield error.objection
        return
    yield from configuration.objections(config)
    original = config.get("model_type") == "chatglm"  # converted before anything loads it
    loads = not code_allowed and not original and (task in LOADERS or config.get("auto_map"))
    if loads and (reason := configuration.own_code(config)):
        yield Objection("config.json", reason, _code_hint(config))
        loads = False
    rows = configuration.vocabulary_size(config)
    try:
        settings = tokenizers.read_object(place, "tokenizer_config.json") or {}
        if loads and (reason := configuration.own_tokenizer(settings)):
            yield Objection("tokenizer_config.json", reason, _code_hint(settings))
    except tokenizers.Unusable:
        pass  # said below
    try:
        generation = tokenizers.read_object(place, "generation_config.json", files.SMALL_BYTES)
        yield from configuration.generation_objections(generation or {}, rows)
    except tokenizers.Unusable as error:
        yield error.objection
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
        if "metadata" not in (tokenizers.read_object(place, index.name) or {}):
            reason = "it has no 'metadata', without which transformers does not load it"
            return [Objection(index.name, reason, 'write "metadata": {} into it')], ""
    listed = checkpoints.weight_files(place)
    for file in listed:
        process.stage(str(file))
    try:
        stored = describe_tensors(listed, torch_allowed=False)
    except NeedsTorch:
        return [], "its weights are in the format before torch 1.6"
    config = checkpoints.read_config(place)
    described = needed(config)
    if config.get("model_type") == "chatglm":
        return [], "it is converted first"
    if described is None and config.get("model_type") in FAMILIES:
        return [], "its config.json leaves out sizes"
    if described is None or task not in LOADERS:
        return [], f"{configuration.shown(config.get('model_type'))} {_LIBRARYS}"
    shapes = {name: info.shape for name, info in stored.items()}
    packed = bool(config.get("quantization_config"))
    found = weights.difference(
        described.shapes,
        shapes,
        prefix=described.prefix,
        tied=described.tied,
        packed=packed,
        new=LOADERS[task][1],
    )
    reason, hint = weights.objection(found)
    own = not packed and not config.get("num_nextn_predict_layers")
    if own and not reason and (left := weights.unread(found, described.shapes)):
        reason = weights.left_over(left)
    return ([Objection("", reason, hint)] if reason else []), ""


# ---------------------------------------------------------------- families without a table


def _by_library(directory: str, options: Sequence[Any], later: str) -> tuple[list[Objection], str]:
    """Compare by transformers itself, from a cache on disk or in a process with torch."""
    place = Path(directory)
    loader, _ = LOADERS.get(str(options[0]), ("", ()))
    installed = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    first = next(iter(checkpoints.weight_files(place)))
    if not loader or not installed or options[3] or options[4] or first.suffix != ".safetensors":
        return [], later
    if checkpoints.read_config(place).get("quantization_config") or _LIBRARYS not in later:
        return [], later
    key = hashlib.sha256(f"{directory} {_state(place)} {loader} {_versions()}".encode()).hexdigest()
    cached = cache_root() / "looks" / f"{key[:32]}.json"
    try:
        reason, hint = json.loads(files.read_text(cached))
    except (OSError, ValueError):
        try:
            reason, hint = _LIBRARY.call(
                f"{__name__}:compare", directory=directory, task=options[0]
            )
        except process.Ended as error:
            return [], f"{later}, and transformers' own model of it could not be made ({error})"
        cached.parent.mkdir(parents=True, exist_ok=True)
        aside = cached.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps([reason, hint]), encoding="utf-8")
        aside.replace(cached)
    return ([Objection("", reason, hint)] if reason else []), ""


def _versions() -> str:
    from importlib.metadata import version

    return f"1 {version('torch')} {version('transformers')}"


def compare(directory: str, task: str) -> tuple[str, str]:
    """Return reason and remedy by transformers' own report over tensors without storage; for a
    process with torch."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    loader, new = LOADERS[task]
    place = Path(directory)
    process.stage(str(place / "config.json"))
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    with torch.device("meta"):
        kind = type(getattr(transformers, loader).from_config(config, trust_remote_code=False))
    stored = describe_tensors(checkpoints.weight_files(place))
    state = {
        name: torch.empty(info.shape, device="meta", dtype=torch.float16)
        for name, info in stored.items()
    }
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=state,
        trust_remote_code=False,
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    names = model.state_dict()
    found = weights.reported(report, len(names), new)
    reason, hint = weights.objection(found)
    own = not getattr(config, "num_nextn_predict_layers", 0)
    if own and not reason and (left := weights.unread(found, names)):
        reason = weights.left_over(left)
    return reason, hint
