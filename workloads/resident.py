"""The one loaded model that a warm worker keeps between jobs.

Loading costs more than measuring for many jobs, so the next job with an equal residency key gets
what the last one loaded, and the row says so. There is room for one model: the old one is gone,
and its memory released, before the next is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workloads.isolation import KeptConfig, generation_configs, restore_generation_configs


class ResidentModel:
    """A loaded model under its residency key, and its generation config as it was at first."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.was_used = False  # by the current job, without loading
        self._loaded: Any = None
        self._configs: list[KeptConfig] = []

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
        self._configs = generation_configs(self._loaded)
        self.key = key
        return self._loaded

    def clean(self) -> None:
        """Undo what an earlier job did to the model's generation config."""
        restore_generation_configs(self._configs)

    def drop(self) -> None:
        """Let go of the model."""
        self.key, self._loaded, self._configs = None, None, []
