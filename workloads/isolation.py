"""Jobs that share a warm process must not leave traces in one another.

A library call in one job can change what the next one measures: the default dtype, a gradient mode,
a matmul precision, an environment variable, or a model's generation config, into which ``generate``
of some libraries writes its arguments back. Before each job the process is put back to how it was
after its imports, and a resident model's generation config to how it was after loading.

Loading costs more than measuring for many jobs, so the next job with an equal residency key gets
the model that the last one loaded, and the row says so. There is room for one model: the old one is
gone, and its memory released, before the next is loaded.
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
        """The settings as they are."""
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
        """Put the process back to these settings. Seeding is the device's (``Device.seed``)."""
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
    """A loaded model under its residency key, and its generation configs as they were at first."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.was_used = False  # by the current job, without loading
        self._loaded: Any = None
        self._configs: list[tuple[Any, Any, dict[str, Any]]] = []  # owner, config, its content

    def holds(self, key: str) -> bool:
        """Tell if the model under this key is loaded."""
        return self.key == key

    def use(self) -> Any:
        """The loaded model."""
        self.was_used = True
        return self._loaded

    def load(self, key: str, loader: Callable[[], Any]) -> Any:
        """Load a model and keep it; the place has to be empty."""
        self._loaded = loader()
        owned = [(part, getattr(part, "generation_config", None)) for part in _parts(self._loaded)]
        self._configs = [
            (owner, config, copy.deepcopy(vars(config)))
            for owner, config in owned
            if hasattr(config, "__dict__") and not callable(config)
        ]
        self.key = key
        return self._loaded

    def clean(self) -> None:
        """Give every owner its own generation config back, with the content it had at first."""
        for owner, config, content in self._configs:
            if owner.generation_config is not config:
                owner.generation_config = config
            vars(config).clear()
            vars(config).update(copy.deepcopy(content))

    def drop(self) -> None:
        """Let go of the model."""
        self.key, self._loaded, self._configs = None, None, []


def _parts(loaded: Any) -> list[Any]:
    """All that may own a generation config: what a loader returned, and the items of a tuple, list
    or mapping, or a dataclass's fields."""
    if is_dataclass(loaded) and not isinstance(loaded, type):
        return [loaded, *(getattr(loaded, field.name) for field in fields(loaded))]
    if isinstance(loaded, Mapping):
        return [loaded, *loaded.values()]
    return [loaded, *loaded] if isinstance(loaded, (tuple, list)) else [loaded]
