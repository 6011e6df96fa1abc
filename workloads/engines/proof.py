"""Proof that a graph computes what torch computes, on a padded batch, before anything is timed.

The batch and torch's outputs in fp32 are written beside the graph when it is exported. Every
session that is opened later, in whatever precision and on whatever level of optimisation, runs the
same batch. A quantised graph is another model: its difference is a result, and stands in the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from workloads.base import BadConfiguration, Request
from workloads.models import precision as precisions
from workloads.models.loading import ModelSource
from workloads.registry import task_for

_FILE = "proof.safetensors"
#: Differences beyond so many standard deviations of torch's outputs are no rounding.
_ROUNDING = {"fp32": 1e-3, "fp16": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Distance of a graph's outputs from torch's."""

    largest: float
    spread: float  # standard deviation of torch's outputs

    def figures(self) -> dict[str, float]:
        """Its figures, by the names that the engine declares."""
        return {"largest_output_difference": self.largest, "output_spread": self.spread}

    def check(self, precision: str, path: Path) -> None:
        """Refuse a graph that computes something else.

        Raises:
            BadConfiguration: the difference is no rounding of this precision.
        """
        limit = _ROUNDING.get(precision)
        if limit is not None and not self.largest <= limit * self.spread:
            raise BadConfiguration(
                f"the graph {path} does not compute what torch computes: on a padded batch in "
                f"{precision} an output is off by {self.largest:.3g} at a spread of "
                f"{self.spread:.3g}. Nothing was timed; another release of the exporter or less "
                "optimisation of the graph may do better"
            )


def difference(found: torch.Tensor, reference: torch.Tensor) -> Difference:
    """Compare outputs of one shape; what is no number differs infinitely."""
    apart = (found.float().cpu() - reference).abs().nan_to_num(nan=torch.inf)
    return Difference(largest=float(apart.max()), spread=float(reference.float().std()))


def save(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a batch and torch's outputs beside a graph."""
    save_file({name: one.contiguous() for name, one in tensors.items()}, directory / _FILE)


def load(directory: Path) -> dict[str, torch.Tensor]:
    """The batch and the outputs that were written beside a graph."""
    return load_file(directory / _FILE)


def in_fp32(request: Request, source: ModelSource) -> Any:
    """The model in torch that is exported: by its task, in evaluation mode."""
    loader = task_for(request.workload, source.entry).function("load")
    dtype = {precisions.dtype_keyword(): torch.float32}
    return loader(source, attn_implementation="sdpa", **dtype).eval()


def drawn_ids(model: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of these lengths, spread over the vocabulary."""
    drawn = torch.Generator().manual_seed(0)
    size = int(model.get_input_embeddings().num_embeddings)
    return [torch.randint(size, (length,), generator=drawn).tolist() for length in lengths]
