"""Isolation of jobs that share a warm process.

Before each job the process's global settings (default dtype, gradient mode, matmul precision,
environment) are restored to those after its imports, and a resident model's generation config,
which some libraries' ``generate`` overwrites, to that after loading. One model stays loaded for the
next job with an equal residency key; it is released before another is loaded.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The global settings of a process that jobs may change."""

    environment: Mapping[bytes, bytes]
    threads: int
    default_dtype: Any
    grad_enabled: bool
    matmul_precision: str
    deterministic: bool

    @classmethod
    def now(cls) -> ProcessState:
        """Return the current settings."""
        import torch

        return cls(
            environment=dict(os.environb),
            threads=torch.get_num_threads(),
            default_dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def restore(self) -> None:
        """Restore these settings, but not seeds (see ``Device.seed``)."""
        import torch

        if (now := dict(os.environb)) != self.environment:
            for name in now.keys() - self.environment.keys():
                del os.environb[name]
            os.environb.update(self.environment)
        # Only where it differs: setting it rebuilds thread pools.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.grad_enabled)
        torch.set_float32_matmul_precision(self.matmul_precision)
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic)  # which imports torch's compiler


class ResidentModel:
    """A loaded model under its residency key, and its original generation configs."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.was_used = False  # by the current job, without loading
        self.loaded: Any = None
        self._configs: list[tuple[Any, Any, dict[str, Any]]] = []  # owner, config, its content

    def load(self, key: str, loader: Callable[[], Any]) -> Any:
        """Load a model and keep it; no other may be loaded."""
        self.loaded = loader()
        owned = [(part, getattr(part, "generation_config", None)) for part in _parts(self.loaded)]
        self._configs = [
            (owner, config, copy.deepcopy(vars(config)))
            for owner, config in owned
            if hasattr(config, "__dict__") and not callable(config)
        ]
        self.key = key
        return self.loaded

    def clean(self) -> None:
        """Restore every owner's original generation config."""
        for owner, config, content in self._configs:
            if owner.generation_config is not config:
                owner.generation_config = config
            vars(config).clear()
            vars(config).update(copy.deepcopy(content))

    def drop(self) -> None:
        """Release the model."""
        self.key, self.loaded, self._configs = None, None, []


def _parts(loaded: Any) -> list[Any]:
    """Possible owners of a generation config: the loaded object and its items or fields."""
    if is_dataclass(loaded) and not isinstance(loaded, type):
        return [loaded, *(getattr(loaded, field.name) for field in fields(loaded))]
    if isinstance(loaded, Mapping):
        return [loaded, *loaded.values()]
    return [loaded, *loaded] if isinstance(loaded, (tuple, list)) else [loaded]
