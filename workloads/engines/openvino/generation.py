"""OpenVINO GenAI's continuous batching over a decoder's graph, which is converted once.

The loop runs step by step, so that each token has its own time. The library returns no logits: the
same graph, opened without paged attention, computes them.

A model is traced as a step. Its keys and values become states (``ReadValue``), by which OpenVINO
GenAI recognises attention. The mask has all four axes, so that its creation is not traced. A new
graph must give torch's logits for a short text; length-dependent models are limited or refused.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workloads.base import BadConfiguration, Request, Unsupported
from workloads.devices.base import Device
from workloads.engines.exports import (
    difference,
    digest,
    drawn_ids,
    exported_directory,
    facts_of,
    in_fp32,
    package_versions,
    text_facts,
)
from workloads.engines.loaded import (
    Answered,
    Generated,
    Generation,
    SteppedEngine,
    Stepping,
    computed,
)
from workloads.engines.openvino import BF16_THREADS, SPEC
from workloads.models import precision as precisions
from workloads.models import rules
from workloads.models.loading import ModelSource, load_tokenizer, open_model
from workloads.models.precision import ModelWeights
from workloads.util.contents import fingerprint

GRAPH = "openvino_model.xml"
_RECIPE = 2  # part of the cache's keys; raise it when conversions change
_PACKAGES = ("torch", "transformers", *(package.name for package in SPEC.packages))
_TEXT = ("input_ids", "attention_mask", "position_ids")
_PROOF_TOKENS, _PROOF_FIRST = 9, 5
#: nncf's mode and options of a precision.
_COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("INT8_SYM", {}),
    "int4": ("INT4_SYM", {"group_size": 64}),
}


class _Step(torch.nn.Module):
    """A forward pass over new tokens after given keys and values."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        from transformers.cache_utils import DynamicCache, DynamicLayer

        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        before, new = past[0].shape[2], input_ids.shape[1]
        earlier = torch.arange(before + new)[None, :] <= torch.arange(before, before + new)[:, None]
        seen = earlier[None, None] & (attention_mask[:, None, None, :] != 0)
        found = self.model(
            input_ids=input_ids,
            attention_mask=torch.where(seen, 0.0, torch.finfo(torch.float32).min),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        grown = found.past_key_values.layers
        return (found.logits, *(part for each in grown for part in (each.keys, each.values)))


def properties_of(computes_in: str, **more: object) -> dict[str, object]:
    """OpenVINO's properties for one type of products, keys and values."""
    return {"INFERENCE_PRECISION_HINT": computes_in, "KV_CACHE_PRECISION": computes_in, **more}


class StatefulGraph:
    """An open graph that reads one text at a time; ``computes_in`` is OpenVINO's name of the type
    of products."""

    def __init__(self, directory: Path, properties: dict[str, object]) -> None:
        import openvino

        compiled = openvino.Core().compile_model(str(directory / GRAPH), "CPU", properties)
        self.computes_in = str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        self._request = compiled.create_infer_request()

    def read(self, *parts: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, vocabulary] of a text read part by part."""
        self._request.reset_state()
        found, before = [], 0
        for part in parts:
            after = before + len(part)
            done = self._request.infer(
                {
                    "input_ids": np.array([part], dtype=np.int64),
                    "attention_mask": np.ones((1, after), dtype=np.int64),
                    "position_ids": np.arange(before, after, dtype=np.int64)[None],
                    "beam_idx": np.zeros(1, dtype=np.int32),
                }
            )
            found.append(torch.from_numpy(done["logits"].copy())[0])
            before = after
        return torch.cat(found)


def graph_directory(request: Request, source: ModelSource, tokenizer: Any) -> Path:
    """Directory of a model's graph in a precision, converted if not in the node's cache;
    BadConfiguration if the graph's outputs differ from torch's."""
    model = fingerprint(Path(source.path))
    plain = exported_directory(
        _key("fp32", model), lambda to: _export(in_fp32(request, source), tokenizer, to)
    )
    if request.precision not in _COMPRESSED:
        return plain
    facts = facts_of(plain)
    return exported_directory(
        _key(request.precision, model, version("nncf")),
        lambda to: facts | _compress(plain, to, request.precision, facts["architecture"]),
        before_s=facts["export_s"],
    )


def _key(*parts: str) -> str:
    return f"openvino-{digest(_RECIPE, package_versions(_PACKAGES), *parts)}"


@torch.no_grad()
def _export(model: Any, tokenizer: Any, directory: Path) -> dict[str, Any]:
    import openvino

    window = window_of(model)
    (ids,) = drawn_ids(model, (_PROOF_TOKENS,))
    graph = _traced(model, ids)
    openvino.save_model(graph, directory / GRAPH, compress_to_fp16=False)
    (directory / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    read = StatefulGraph(directory, properties_of("f32")).read
    reference = model(input_ids=torch.tensor([ids])).logits[0].float()
    parts = ids[:_PROOF_FIRST], ids[_PROOF_FIRST:]
    difference(read(*parts), reference).check("fp32", directory / GRAPH)
    return text_facts(model, tokenizer) | {"window": window} | _stored(graph)


def window_of(model: Any) -> int | None:
    """Most positions for which attending to the whole text equals the model; None: any number.
    Unsupported if there is no such number."""
    name, narrow = type(model).__name__, rules.narrow_layers(model.config)
    if kind := rules.moving_rotation(model):
        raise Unsupported(
            f"{name} cannot become a graph of OpenVINO: its rotary positions ({kind}) depend on "
            "the text's length"
        )
    if not all(narrow.values()):
        raise Unsupported(
            f"{name} cannot become a graph of OpenVINO: it has layers that see a part of the text "
            f"only ({', '.join(narrow)})"
        )
    return min(narrow.values(), default=None)


def _traced(model: Any, ids: Sequence[int]) -> Any:
    import openvino

    name = type(model).__name__
    lacking = set(_TEXT) - set(inspect.signature(model.forward).parameters)
    first = model(input_ids=torch.tensor([ids[:2]] * 2), use_cache=True)
    layers = getattr(first.past_key_values, "layers", None)
    if lacking or not layers:
        what = f"takes no {sorted(lacking)[0]}" if lacking else "keeps no keys and values by layer"
        raise Unsupported(f"{name} cannot become a graph of OpenVINO: it {what}")
    before, new = layers[0].keys.shape[2], 3
    past = [part for layer in layers for part in (layer.keys, layer.values)]
    positions = torch.arange(before, before + new).expand(2, new)
    sample = (torch.tensor([ids[:new]] * 2), torch.ones(2, before + new).long(), positions, *past)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about each traced constant
            graph = openvino.convert_model(_Step(model), example_input=sample)
    except Exception as error:  # torch's tracer and OpenVINO's converter have many classes
        text = (str(error).strip() or repr(error)).splitlines()[0]
        raise Unsupported(f"{name} cannot become a graph of OpenVINO: {text:.300}") from error
    kinds = [f"{index}.{kind}" for index in range(len(layers)) for kind in ("key", "value")]
    states = {f"past_key_values.{kind}": f"present.{kind}" for kind in kinds}
    shapes: list[list[int]] = [[-1, -1]] * len(_TEXT)
    shapes += [[-1, part.shape[1], -1, part.shape[3]] for part in past]
    for port, called, shape in zip(graph.inputs, (*_TEXT, *states), shapes, strict=True):
        port.get_tensor().set_names({called})
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    for port, called in zip(graph.outputs, ("logits", *states.values()), strict=True):
        port.get_tensor().set_names({called})
    graph.validate_nodes_and_infer_types()
    _make_stateful(graph, states)
    return graph


def _make_stateful(graph: Any, states: Mapping[str, str]) -> None:
    """Turn inputs and outputs into states, initially empty, with rows by ``beam_idx``."""
    import openvino
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    rows = ops.parameter(openvino.PartialShape([-1]), openvino.Type.i32, name="beam_idx")
    rows.output(0).get_tensor().set_names({"beam_idx"})
    graph.add_parameters([rows])
    for name in states:
        port = graph.input(name)
        readers = port.get_target_inputs()
        chosen = ops.gather(port, rows, ops.constant(0))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, dict(states))
    shape = ops.shape_of(graph.input("input_ids"), output_type="i64")
    batch = ops.gather(shape, ops.constant([0]), ops.constant(0))
    for state in (each for each in graph.get_ops() if each.get_type_name() == "ReadValue"):
        sizes = [
            0 if size.is_dynamic else size.get_length()
            for size in list(state.get_output_partial_shape(0))[1:]
        ]
        whole = ops.concat([batch, ops.constant(np.array(sizes, dtype=np.int64))], axis=0)
        zero = ops.constant(0.0, dtype=state.get_output_element_type(0))
        state.set_arguments([ops.broadcast(zero, whole)])
    graph.validate_nodes_and_infer_types()


def _compress(plain: Path, directory: Path, precision: str, model: str) -> dict[str, Any]:
    import nncf
    import openvino

    mode, options = _COMPRESSED[precision]
    graph = openvino.Core().read_model(str(plain / GRAPH))
    nncf.set_log_level(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):  # progress bars
        compressed = nncf.compress_weights(
            graph, mode=getattr(nncf.CompressWeightsMode, mode), **options
        )
    openvino.save_model(compressed, directory / GRAPH, compress_to_fp16=False)
    (directory / "config.json").write_bytes((plain / "config.json").read_bytes())
    stored = _stored(compressed)
    if not stored["bits"].get(precision.removeprefix("int")):
        raise BadConfiguration(f"nncf stored no weight of {model} in {precision}")
    return stored


def _stored(graph: Any) -> dict[str, Any]:
    """Bytes of a graph's constants, and counts of weights by bits."""
    constants = [each for each in graph.get_ops() if each.get_type_name() == "Constant"]
    counts: dict[str, int] = {}
    total = 0
    for each in constants:
        kind = each.get_element_type()
        count = int(np.prod(list(each.get_output_shape(0)), dtype=np.int64))
        total += -(-count * kind.bitwidth // 8)
        if kind.is_integral() and kind.bitwidth <= 8 and count > 1:
            counts[str(kind.bitwidth)] = counts.get(str(kind.bitwidth), 0) + count
    return {"weight_bytes": total, "bits": counts}


_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
#: Beyond any batch: ``SteppedEngine`` limits texts, not the library.
_NO_LIMIT = 1 << 16


class Pipeline:
    """An open pipeline, reopened when a job's number of threads changes."""

    def __init__(self, directory: Path, computes_in: str, *, least_threads: int = 1) -> None:
        self._directory, self._computes_in = directory, computes_in
        self._least_threads = least_threads
        self._stateful: StatefulGraph | None = None
        self._open()

    @property
    def properties(self) -> dict[str, object]:
        """OpenVINO's properties of a job."""
        return properties_of(
            self._computes_in,
            INFERENCE_NUM_THREADS=self._threads,
            ENABLE_CPU_PINNING=False,  # workers would pin the same cores
        )

    def _open(self) -> None:
        """Raise ``Unsupported`` if this process has too few threads."""
        import openvino_genai

        began = time.perf_counter()
        self._threads = torch.get_num_threads()
        if self._threads < self._least_threads:
            raise Unsupported(
                f"OpenVINO ends its process where it opens weights in {self._computes_in} with "
                f"fewer threads than {self._least_threads}, and this one has {self._threads}: use "
                "the engine transformers"
            )
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = scheduler.max_num_batched_tokens = _NO_LIMIT
        scheduler.cache_size = 0  # grows as texts need it
        scheduler.enable_prefix_caching = False  # repeats must read prompts again
        self.opened = openvino_genai.ContinuousBatchingPipeline(
            self._directory, scheduler, "CPU", self.properties
        )
        self.start_s = time.perf_counter() - began

    def take_threads(self) -> None:
        """Reopen the pipeline if the number of threads has changed."""
        if self._threads != torch.get_num_threads():
            self._stateful = None
            self._open()

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, vocabulary] of a text; BadConfiguration if the library computes in
        another type than requested."""
        if self._stateful is None:
            opened = StatefulGraph(self._directory, self.properties)
            if opened.computes_in != self._computes_in:
                raise BadConfiguration(
                    f"OpenVINO computes in {opened.computes_in}, and was asked for "
                    f"{self._computes_in}: the row would bear a wrong name"
                )
            self._stateful = opened
        return self._stateful.read(ids).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoEngine(SteppedEngine):
    """A causal language model in OpenVINO GenAI."""

    pipeline: Pipeline

    def prepare(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        from openvino import Tensor

        self.pipeline.take_threads()
        return [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]

    def generate(self, prepared: list[Any], generation: Generation) -> Callable[[], Generated]:
        tokens = self.write_together(prepared, generation, lambda indices: generation.on_step())

        def fetch() -> Generated:
            prompts = [prompt.data[0].tolist() for prompt in prepared]
            texts = list(map(Answered, prompts, tokens)) if generation.keep_logits else []
            rows = list(self.answer_logits(texts))
            return Generated(
                tokens=tokens,
                computed_tokens=computed(sum(map(len, prompts)), tokens),
                # By step; zeros after an end.
                logits=list(torch.nn.utils.rnn.pad_sequence(rows)) if rows else (),
            )

        return fetch

    def begin(self, prepared: Sequence[Any], output_tokens: int, ends: Collection[int]) -> Stepping:
        import openvino_genai as genai

        pipeline, config = self.pipeline.opened, genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.do_sample = False
        config.ignore_eos = not ends
        config.stop_token_ids = set(ends) or {0}  # the library needs one, even if ignored
        config.eos_token_id = min(config.stop_token_ids)
        tokens: list[list[int]] = [[] for _ in prepared]
        running: dict[int, Any] = {}

        def add(index: int) -> None:
            running[index] = pipeline.add_request(index, prepared[index], config)

        def step() -> tuple[list[int], list[int]]:
            pipeline.step()
            fresh = [index for index, handle in running.items() if handle.can_read()]
            for index in fresh:
                (output,) = running[index].read().values()
                tokens[index] += output.generated_ids
            ended = []
            for index, handle in list(running.items()):
                status = handle.get_status()
                if status == genai.GenerationStatus.RUNNING:
                    continue
                if status != genai.GenerationStatus.FINISHED:
                    raise BadConfiguration(
                        f"OpenVINO GenAI gave up a text after {len(tokens[index])} tokens "
                        f"({status.name}): there is no room for its keys and values"
                    )
                del running[index]
                ended.append(index)
            return fresh, ended

        return Stepping(tokens=tokens, add=add, step=step)

    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[torch.Tensor]:
        for text in texts:
            read = self.pipeline.read([*text.prompt, *text.answer])
            yield read[len(text.prompt) - 1 : -1]


def load(request: Request, device: Device) -> OpenVinoEngine:
    """Open the graph of ``request.model``, converted if missing; see ``EngineLoader``."""
    means = precisions.require(request.precision, device.name, request.engine).means
    computes_in = _computing_type(request.precision)
    source = open_model(request.model)
    tokenizer = load_tokenizer(source)
    directory = graph_directory(request, source, tokenizer)
    facts = facts_of(directory)
    least = BF16_THREADS if request.precision == "bf16" else 1
    pipeline = Pipeline(directory, computes_in, least_threads=least)
    return OpenVinoEngine(
        pipeline=pipeline,
        tokenizer=tokenizer,
        source=source,
        weights=_weights(facts, request.precision, means),
        end_token_ids=frozenset(facts["end_token_ids"]),
        context_length=facts["positions"],
        window=facts["window"],
        details={
            "attention": "paged",
            "architecture": facts["architecture"],
            "computes_in": computes_in,
            "kv_cache": computes_in,
        },
        figures={"export_s": facts["export_s"], "pipeline_start_s": pipeline.start_s},
    )


def _computing_type(precision: str) -> str:
    """OpenVINO's name of the type of products; Unsupported if this CPU lacks it, as the library
    would take another."""
    import openvino

    name = _TYPES[precisions.compute_dtype(precision)]
    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if name.upper() in able or name == "f32":
        return name
    if precisions.quantized(precision):
        return "f32"
    raise Unsupported(f"this CPU has no products in {precision} for OpenVINO, which would take f32")


def _weights(facts: dict[str, Any], precision: str, means: str) -> ModelWeights:
    count = int(facts["parameter_count"])
    if not precisions.quantized(precision):
        size = precisions.compute_dtype(precision).itemsize
        return ModelWeights(
            weight_bytes=count * size, parameter_count=count, quantized_share=0.0, detail=means
        )
    bits = precision.removeprefix("int")
    share = min(facts["bits"][bits] / count, 1.0)
    return ModelWeights(
        weight_bytes=int(facts["weight_bytes"]),
        parameter_count=count,
        quantized_share=share,
        detail=f"{means}; {share:.0%} of the weights in {bits} bits",
    )
