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

from workloads.environment import environment_bytes


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
            environment=environment_bytes(),
            threads=torch.get_num_threads(),
            default_dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def restore(self) -> None:
        """Put the process back to these settings. Seeding is the device's (``Device.seed``)."""
        import torch

        # Only where it differs: setting all of it takes a tenth of a short job's time.
        if (now := environment_bytes()) != self.environment:
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


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """A generation config, who owns it, and what it held after loading."""

    owner: Any
    config: Any
    content: dict[str, Any]


def generation_configs(loaded: Any) -> list[KeptConfig]:
    """Keep what ``restore_generation_configs`` needs of every generation config that a loader
    returned: of the object itself, the items of a tuple, list or dict, or a dataclass's fields."""
    parts = [loaded]
    if is_dataclass(loaded) and not isinstance(loaded, type):
        parts += [getattr(loaded, field.name) for field in fields(loaded)]
    elif isinstance(loaded, Mapping):
        parts += list(loaded.values())
    elif isinstance(loaded, (tuple, list)):
        parts += list(loaded)
    owned = [(part, getattr(part, "generation_config", None)) for part in parts]
    return [
        KeptConfig(owner, config, copy.deepcopy(vars(config)))
        for owner, config in owned
        if hasattr(config, "__dict__") and not callable(config)
    ]


def restore_generation_configs(kept: list[KeptConfig]) -> None:
    """Give every owner its own config back, holding what it held after loading."""
    for each in kept:
        if each.owner.generation_config is not each.config:
            each.owner.generation_config = each.config
        content = vars(each.config)
        content.clear()
        content.update(copy.deepcopy(each.content))
