"""OpenVINO GenAI's continuous batching, step by step, so that each token has its own time. The
library returns no logits: the same graph, opened without paged attention, computes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from workloads.base import BadConfiguration, Request, Unsupported
from workloads.devices.base import Device
from workloads.engines.exports import facts_of
from workloads.engines.loaded import Answered, Generated, SteppedEngine, Stepping, computed
from workloads.engines.openvino import BF16_THREADS
from workloads.engines.openvino.graph import StatefulGraph, graph_directory, properties_of
from workloads.models import precision as precisions
from workloads.models.loading import load_tokenizer, open_model
from workloads.models.precision import ModelWeights

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
        return {
            **properties_of(self._computes_in),
            "INFERENCE_NUM_THREADS": self._threads,
            "ENABLE_CPU_PINNING": False,  # workers would pin the same cores
        }

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
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            self._directory, scheduler, "CPU", self.properties
        )
        self.start_s = time.perf_counter() - began

    def take_threads(self) -> None:
        """Reopen the pipeline if the number of threads has changed."""
        if self._threads != torch.get_num_threads():
            self._stateful = None
            self._open()

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, vocabulary] of a text.

        Raises:
            BadConfiguration: the library computes in another type than requested.
        """
        if self._stateful is None:
            opened = StatefulGraph(self._directory, self.properties)
            if opened.computes_in != self._computes_in:
                raise BadConfiguration(
                    f"OpenVINO computes in {opened.computes_in}, and was asked for "
                    f"{self._computes_in}: the row would bear a wrong name"
                )
            self._stateful = opened
        return self._stateful.read(ids).float()

    def begin(self, prompts: Sequence[Any], output_tokens: int, ends: Collection[int]) -> Stepping:
        """Set up generation; see ``SteppedEngine``."""
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.do_sample = False
        config.ignore_eos = not ends
        config.stop_token_ids = set(ends) or {0}  # the library needs one, even if ignored
        config.eos_token_id = min(config.stop_token_ids)
        tokens: list[list[int]] = [[] for _ in prompts]
        running: dict[int, Any] = {}

        def add(index: int) -> None:
            running[index] = self._pipeline.add_request(index, prompts[index], config)

        def step() -> tuple[list[int], list[int]]:
            self._pipeline.step()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoEngine(SteppedEngine):
    """A causal language model in OpenVINO GenAI."""

    pipeline: Pipeline

    def prepare(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        from openvino import Tensor

        self.pipeline.take_threads()
        return [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]

    def generate(
        self,
        prepared: list[Any],
        *,
        output_tokens: int,
        ignore_eos: bool,
        on_step: Callable[[], None],
        keep_logits: bool = False,
    ) -> Callable[[], Generated]:
        tokens = self.write(
            prepared,
            places=len(prepared),
            output_tokens=output_tokens,
            ends=() if ignore_eos else self.end_token_ids,
            on_step=lambda indices: on_step(),
        )
        read = sum(prompt.shape[1] for prompt in prepared)
        return lambda: Generated(
            tokens=tokens,
            computed_tokens=computed(read, tokens),
            logits=self._logits(prepared, tokens) if keep_logits else (),
        )

    def begin(self, prepared: Sequence[Any], output_tokens: int, ends: Collection[int]) -> Stepping:
        return self.pipeline.begin(prepared, output_tokens, ends)

    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[torch.Tensor]:
        for text in texts:
            read = self.pipeline.read([*text.prompt, *text.answer])
            yield read[len(text.prompt) - 1 : -1]

    def _logits(self, prompts: Sequence[Any], tokens: Sequence[Sequence[int]]) -> list[Any]:
        """Logits [batch, vocabulary] of each step; zeros after an end."""
        rows = []
        for prompt, ids in zip(prompts, tokens, strict=True):
            before = prompt.data[0].tolist()
            rows.append(self.pipeline.read([*before, *ids])[len(before) - 1 : -1])
        return list(torch.nn.utils.rnn.pad_sequence(rows))


def load(request: Request, device: Device) -> OpenVinoEngine:
    """Open the graph of ``request.model``, converted if missing; see ``EngineLoader``."""
    transformers_logging.disable_progress_bar()
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
    """OpenVINO's name of the type of products.

    Raises:
        Unsupported: this CPU lacks it, and the library would take another.
    """
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
