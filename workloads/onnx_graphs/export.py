"""Models exported as graphs, once, into the node's cache.

transformers' own exporter does it, which knows what its classes need; what is not one of its
classes (a diffusion U-Net) goes through ``torch.onnx.export``. Samples have several rows of unlike
length: a batch of one would become a fixed one in the graph, and a mask of ones would be dropped
from its inputs, so that padded batches were silently wrong. For the same reason the axes that may
vary are named, and every graph is compared with torch on a padded batch (``proof.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from workloads import base
from workloads.base import Request, Unsupported
from workloads.data.cache import cached_directory
from workloads.engines.onnxruntime import SPEC
from workloads.models import precision as precisions
from workloads.models.chatglm3.conversion import content_digest, fingerprint
from workloads.models.loading import ModelSource
from workloads.registry import task_for

GRAPH, FACTS = "graph.onnx", "facts.json"
#: The fact that is equal on all nodes that export the same weights alike; directories' names, made
#: of paths and times, are not.
IDENTITY = "identity"
#: Raise when exports become something else: it is in the cache's keys.
_RECIPE = 2
#: Packages whose versions change what is exported.
_PACKAGES = ("torch", "transformers", "diffusers", *(each.name for each in SPEC.packages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The way in which a graph is exported."""

    constant_folding: bool
    fusions: Any  # the kind of device whose operators are taken, "" for none
    reordering: bool

    @staticmethod
    def of(settings: Mapping[str, Any], device: str) -> Options:
        """The options that an engine's settings ask for, on a device."""
        return Options(
            constant_folding=bool(settings.get("constant_folding", True)),
            fusions=device if settings.get("fusions") else "",
            reordering=bool(settings.get("reordering", False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Arguments of a forward pass, to export from."""

    inputs: Mapping[str, Any]
    #: For each input the axes that may vary; a cache's are those of all its tensors.
    varying: Mapping[str, tuple[int, ...]]


def key_of(kind: str, *parts: object) -> str:
    """The cache's name for something that is made of these parts by these versions."""
    text = json.dumps([_RECIPE, kind, _versions(), *parts], sort_keys=True)
    return f"onnx-{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def in_fp32(request: Request, source: ModelSource) -> Any:
    """The model in torch that is exported: by its task, in evaluation mode."""
    loader = task_for(request.workload, source.entry).function("load")
    dtype = {precisions.dtype_keyword(): torch.float32}
    return loader(source, attn_implementation="sdpa", **dtype).eval()


def exported_directory(
    kind: str, source: ModelSource, options: Options, build: Callable[[Path], dict[str, Any]]
) -> Path:
    """The directory of a model's graphs; ``build`` fills it, and returns what is to be known of
    them. Its time is kept beside them."""
    model = Path(source.path)
    key = key_of(kind, fingerprint(model), asdict(options))

    def timed(directory: Path) -> None:
        base.report_phase("compile")
        began = time.perf_counter()
        facts = build(directory)
        facts["export_s"] = time.perf_counter() - began
        facts[IDENTITY] = key_of(kind, content_digest(model), asdict(options))
        write_facts(directory, facts)
        base.report_phase("load")

    return cached_directory(key, timed)


def write_facts(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write what is to be known of a directory's graphs."""
    text = json.dumps(dict(facts), indent=1, sort_keys=True)
    (directory / FACTS).write_text(text + "\n", encoding="utf-8")


def facts_of(directory: Path) -> dict[str, Any]:
    """Facts that were noted of the graphs in a directory."""
    found: dict[str, Any] = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    return found


def graphs_of(directory: Path) -> list[str]:
    """The files of the graphs in a directory."""
    return list(facts_of(directory).get("graphs", [GRAPH]))


def export(
    model: Any, sample: Sample, options: Options, path: Path, *, dropped: str = ""
) -> dict[str, Any]:
    """Write a model as a graph, with its weights in a file beside it; what is to be known of it.

    Args:
        dropped: outputs with this in their names are left out, "": none.

    Raises:
        Unsupported: transformers has no exporter here, or cannot export this model.
    """
    try:
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
    except ImportError as error:
        raise Unsupported(
            "this release of transformers exports no ONNX graphs; install 5.23 or newer"
        ) from error
    config = OnnxConfig(
        dynamic=True,
        dynamic_shapes=_shapes(model, sample),
        optimize=options.constant_folding,
        ort_fusions=options.fusions or None,
    )
    with _quiet():
        try:
            found = OnnxExporter().export(model, dict(sample.inputs), config).program
        except Exception as error:  # torch.export's and the exporter's own classes
            text = (str(error).strip() or repr(error)).splitlines()[0]
            raise Unsupported(
                f"{type(model).__name__} cannot be exported to ONNX: {text:.300}"
            ) from error
    if dropped:
        kept = [output for output in found.graph.outputs if dropped not in (output.name or "")]
        found.graph.outputs[:] = kept
    return write_graph(found, options, path)


def write_graph(graph: Any, options: Options, path: Path) -> dict[str, Any]:
    """Write an exported graph, rewritten as the options say; what is to be known of it."""
    import onnx_ir

    facts = {}
    if options.reordering:
        from workloads.onnx_graphs.reordering import move_slices_forward

        facts["operators_passed_by_slices"] = move_slices_forward(graph)
    onnx_ir.save(graph, str(path), external_data=f"{path.name}.data")
    return facts


def drawn_ids(model: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of these lengths, spread over the vocabulary."""
    drawn = torch.Generator().manual_seed(0)
    size = int(model.get_input_embeddings().num_embeddings)
    return [torch.randint(size, (length,), generator=drawn).tolist() for length in lengths]


def _shapes(model: Any, sample: Sample) -> dict[str, Any]:
    """The axes that may vary, in the form that ``torch.export`` takes."""
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

    register_cache_pytrees_for_model(model)
    return {
        name: _axes(given, sample.varying.get(name, ()))
        for name, given in sample.inputs.items()
        if not isinstance(given, bool)  # flags of what is returned, which the exporter takes out
    }


def _axes(given: Any, varying: tuple[int, ...]) -> Any:
    if isinstance(given, torch.Tensor):
        return dict.fromkeys(varying, torch.export.Dim.AUTO)
    if isinstance(given, dict) and type(given) is dict:
        return {name: _axes(each, varying) for name, each in given.items()}
    node = torch.utils._pytree.SUPPORTED_NODES.get(type(given))
    if node is None:
        return None
    return [_axes(child, varying) for child in node.flatten_fn(given)[0]]


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what exporters tell of every operator that they know."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.onnx", "torch._export", "torch.__trace", "transformers")
    ]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
