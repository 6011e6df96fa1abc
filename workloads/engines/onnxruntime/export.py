"""Models exported as graphs, once, into the node's cache.

transformers' own exporter does it, which knows what its classes need; what is not one of its
classes (a diffusion U-Net) goes through ``torch.onnx.export``. Samples have several rows of unlike
length: a batch of one would become a fixed one in the graph, and a mask of ones would be dropped
from workloads import base
from workloads.base import Unsupported
from its inputs, so that padded batches were silently wrong. For the same reason the axes that may
vary are named, and every graph is compared with torch on a padded batch (``engines/proof.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workloads.base import Unsupported, report_phase
from workloads.data.cache import cached_directory
from workloads.engines.onnxruntime import SPEC
from workloads.models.checkpoints import content_digest, fingerprint
from workloads.models.loading import ModelSource

if TYPE_CHECKING:
    import onnx_ir

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


def exported_directory(
    kind: str, source: ModelSource, options: Options, build: Callable[[Path], dict[str, Any]]
) -> Path:
    """The directory of a model's graphs; ``build`` fills it, and returns what is to be known of
    them. Its time is kept beside them."""
    model = Path(source.path)
    key = key_of(kind, fingerprint(model), asdict(options))

    def timed(directory: Path) -> None:
        report_phase("compile")
        began = time.perf_counter()
        facts = build(directory)
        facts["export_s"] = time.perf_counter() - began
        facts[IDENTITY] = key_of(kind, content_digest(model), asdict(options))
        write_facts(directory, facts)
        report_phase("load")

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
        facts["operators_passed_by_slices"] = move_slices_forward(graph)
    onnx_ir.save(graph, str(path), external_data=f"{path.name}.data")
    return facts


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


#: Operators that compute each element of their output from one element of each input.
ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "Cast", "Ceil", "Clip", "Cos", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu"),
        *("HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Max", "Min", "Mul", "Neg", "Pow"),
        *("Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub"),
        *("Tanh", "Where"),
    }
)
_CHANNELS = 1


def move_slices_forward(model: onnx_ir.Model) -> int:
    """Move every slice as far forward as it may go, in place; how many operators were passed."""
    passed = 0
    while _pass_one(model.graph):
        passed += 1
    return passed


def _pass_one(graph: onnx_ir.Graph) -> bool:
    """Move one slice before the operator that it follows, if there is such a pair."""
    for node in graph:
        if node.op_type != "Slice" or node.domain not in ("", "ai.onnx"):
            continue
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        if before is None or not _alone(before):
            continue
        position = _followed(before, _axes_of_slice(node))
        if position is not None:
            _swap(graph, before, node, position)
            return True
    return False


def _alone(node: onnx_ir.Node) -> bool:
    """Tell if nothing but one other node reads what a node computes."""
    output = node.outputs[0]
    return len(node.outputs) == 1 and not output.is_graph_output() and len(output.uses()) == 1


def _axes_of_slice(node: onnx_ir.Node) -> list[int] | None:
    """The axes that a slice cuts, counted from the front; None where they are not known."""
    data = node.inputs[0]
    if data is None or data.shape is None:
        return None
    rank = len(data.shape)
    if len(node.inputs) < 4 or node.inputs[3] is None:
        starts = node.inputs[1].const_value if node.inputs[1] is not None else None
        return list(range(starts.size)) if starts is not None else None
    constant = node.inputs[3].const_value
    return [int(axis) % rank for axis in constant.numpy()] if constant is not None else None


def _followed(node: onnx_ir.Node, axes: list[int] | None) -> int | None:
    """Position of the input of a node that can be cut instead of its output; None where that would
    compute something else, or where several would have to be cut."""
    output = node.outputs[0]
    if axes is None or output.shape is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "BatchNormalization":
        return None if _CHANNELS in axes else 0
    if node.op_type not in ELEMENTWISE:
        return None
    cut = []
    for position, value in enumerate(node.inputs):
        if value is None:
            continue
        varies = _varies(value, output, axes)
        if varies is None:
            return None
        if varies:
            cut.append(position)
    return cut[0] if len(cut) == 1 else None


def _varies(value: onnx_ir.Value, output: onnx_ir.Value, axes: list[int]) -> bool | None:
    """Tell if an input has the output's sizes along the axes, as opposed to one number that is
    spread over them; None where that is not known."""
    if value.shape is None or output.shape is None:
        return None
    missing = len(output.shape) - len(value.shape)
    found = set()
    for axis in axes:
        own = value.shape[axis - missing] if axis >= missing else 1
        whole = output.shape[axis]
        if own == 1 and whole != 1:
            found.add(False)
        elif missing == 0 and own == whole and _known(own):
            found.add(True)
        else:
            return None
    return found.pop() if len(found) == 1 else None


def _known(size: int | onnx_ir.SymbolicDim) -> bool:
    return isinstance(size, int) or size.value is not None


def _swap(graph: onnx_ir.Graph, before: onnx_ir.Node, node: onnx_ir.Node, position: int) -> None:
    """Let a slice come before the operator that it followed, on one input of it."""
    import onnx_ir

    given, result = before.inputs[position], node.outputs[0]
    earlier = onnx_ir.node("Slice", [given, *node.inputs[1:]])
    if given is not None:  # of the result's shape, as ``_varies`` has made sure
        earlier.outputs[0].type = given.type
        earlier.outputs[0].shape = _cut_shape(given, result, _axes_of_slice(node) or [])
    inputs = list(before.inputs)
    inputs[position] = earlier.outputs[0]
    later = onnx_ir.node(
        before.op_type, inputs, {name: each.value for name, each in before.attributes.items()}
    )
    later.outputs[0].shape, later.outputs[0].type = result.shape, result.type
    graph.insert_after(node, [earlier, later])
    name = result.name
    onnx_ir.convenience.replace_all_uses_with(result, later.outputs[0], replace_graph_outputs=True)
    later.outputs[0].name = name
    graph.remove(node, safe=True)
    graph.remove(before, safe=True)


def _cut_shape(
    given: onnx_ir.Value, result: onnx_ir.Value, axes: list[int]
) -> onnx_ir.Shape | None:
    import onnx_ir

    if given.shape is None or result.shape is None:
        return None
    sizes = enumerate(given.shape)
    return onnx_ir.Shape(result.shape[axis] if axis in axes else size for axis, size in sizes)
