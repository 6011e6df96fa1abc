"""Jobs that share a warm process must not leave traces in one another.

A library call in one job can change what the next one measures: the default dtype, a
gradient mode, a matmul precision, an environment variable, or a model's generation config, into
which ``generate`` of some libraries writes its arguments back. Before each job the process is put
back to how it was after its imports, and a resident model's generation config to how it was after
loading.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The global settings of a process that jobs may change."""

    environment: Mapping[str, str]
    threads: int
    default_dtype: Any
    grad_enabled: bool
    matmul_precision: str
    deterministic: bool

    @classmethod
    def now(cls) -> ProcessState:
        """The settings as they are."""
        import torch

        return cls(
            environment=dict(os.environ),
            threads=torch.get_num_threads(),
            default_dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def restore(self) -> None:
        """Put the process back to these settings. Seeding is the device's (``Device.seed``)."""
        import torch

        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        # Only where it differs: setting it rebuilds thread pools.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.grad_enabled)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic)


def generation_configs(loaded: Any) -> list[tuple[Any, Any]]:
    """(model, deep copy of its generation config) for each model in what a loader returned: the
    object itself, the items of a tuple, list or dict, or the fields of a dataclass."""
    parts = [loaded]
    if is_dataclass(loaded) and not isinstance(loaded, type):
        parts += [getattr(loaded, field.name) for field in fields(loaded)]
    elif isinstance(loaded, Mapping):
        parts += list(loaded.values())
    elif isinstance(loaded, (tuple, list)):
        parts += list(loaded)
    return [
        (part, copy.deepcopy(part.generation_config))
        for part in parts
        if getattr(part, "generation_config", None) is not None
    ]


def restore_generation_configs(snapshot: list[tuple[Any, Any]]) -> None:
    """Give every model a fresh copy of the generation config it had when it was loaded."""
    for model, config in snapshot:
        model.generation_config = copy.deepcopy(config)
