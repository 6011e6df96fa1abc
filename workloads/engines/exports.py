"""Graphs exported once into the node's cache, beside a batch and torch's fp32 outputs, which every
session checks before timing. For quantised graphs the difference is a result of the row."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workloads import base
from workloads.base import BadConfiguration, Request
from workloads.data.cache import cached_directory
from workloads.devices.base import installed_version
from workloads.engines.torch_models import end_token_ids_of
from workloads.models import precision as precisions
from workloads.models.catalog import positions_of
from workloads.models.loading import ModelSource
from workloads.registry import task_for

FACTS, PROOF = "facts.json", "proof.safetensors"
#: Largest difference that counts as rounding, in standard deviations of torch's outputs.
_ROUNDING = {"fp32": 1e-3, "fp16": 0.1}


def digest(*parts: object) -> str:
    """A short hash of JSON values, for the cache's keys."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def package_versions(names: Iterable[str]) -> list[str]:
    """Names and versions of the installed ones."""
    versions = ((name, installed_version(name)) for name in names)
    return [f"{name} {version}" for name, version in versions if version]


def exported_directory(
    key: str, build: Callable[[Path], dict[str, Any]], *, before_s: float = 0.0
) -> Path:
    """The cache's directory of graphs for a key. If missing, ``build`` fills it and returns facts,
    stored with its time plus ``before_s`` of the graph it starts from."""

    def timed(directory: Path) -> None:
        base.report_phase("compile")
        began = time.perf_counter()
        facts = build(directory)
        facts["export_s"] = before_s + time.perf_counter() - began
        write_facts(directory, facts)
        base.report_phase("load")

    return cached_directory(key, timed)


def write_facts(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write facts about the graphs in a directory."""
    text = json.dumps(dict(facts), indent=1, sort_keys=True)
    (directory / FACTS).write_text(text + "\n", encoding="utf-8")


def facts_of(directory: Path) -> dict[str, Any]:
    """Read the facts about the graphs in a directory."""
    facts: dict[str, Any] = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    return facts


def model_facts(model: Any) -> dict[str, Any]:
    """Facts about a torch model that its graph lacks."""
    return {
        "architecture": type(model).__name__,
        "parameter_count": sum(parameter.numel() for parameter in model.parameters()),
        "new_weights": list(getattr(model, "new_weights", ())),
    }


def text_facts(model: Any, tokenizer: Any) -> dict[str, Any]:
    """``model_facts`` of a model that generates text."""
    return model_facts(model) | {
        "positions": positions_of(model.config.to_dict()),
        "end_token_ids": sorted(end_token_ids_of(model, tokenizer)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Distance of a graph's outputs from torch's."""

    largest: float
    spread: float  # standard deviation of torch's outputs

    def check(self, precision: str, path: Path) -> None:
        """Raise ``BadConfiguration`` if the difference exceeds rounding in this precision."""
        limit = _ROUNDING.get(precision)
        if limit is not None and not self.largest <= limit * self.spread:
            raise BadConfiguration(
                f"the graph {path} does not compute what torch computes: on a padded batch in "
                f"{precision} an output is off by {self.largest:.3g} at a spread of "
                f"{self.spread:.3g}. Nothing was timed; another release of the exporter or less "
                "optimisation of the graph may do better"
            )


def difference(outputs: torch.Tensor, reference: torch.Tensor) -> Difference:
    """Compare outputs of one shape; NaN counts as infinite."""
    apart = (outputs.float().cpu() - reference).abs().nan_to_num(nan=torch.inf)
    return Difference(largest=float(apart.max()), spread=float(reference.float().std()))


def in_fp32(request: Request, source: ModelSource) -> Any:
    """Load the torch model to export, by its task, in evaluation mode."""
    loader = task_for(request.workload, source.entry).function("load")
    dtype = {precisions.dtype_keyword(): torch.float32}
    return loader(source, attn_implementation="sdpa", **dtype).eval()


def drawn_ids(model: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Random token ids of these lengths, always the same."""
    drawn = torch.Generator().manual_seed(0)
    size = int(model.get_input_embeddings().num_embeddings)
    return [torch.randint(size, (length,), generator=drawn).tolist() for length in lengths]
