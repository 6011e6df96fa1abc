"""Rows that a script measures on one card: printed, and kept in a file as they come."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers

from workloads.devices.base import Device


class Rows:
    """JSON lines in ``path``; the first says what ran where. ``elapsed_s`` is their clock."""

    def __init__(self, card: Device, path: Path) -> None:
        self._started = time.perf_counter()
        self._file = path.open("a", encoding="utf-8")
        self.write(
            card=card.device_name(),
            driver=card.driver_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            settings=dict(card.configure()),
        )

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the script began to measure."""
        return time.perf_counter() - self._started

    def write(self, **row: Any) -> None:
        """Print and keep a row, with the second at which it came."""
        text = json.dumps(row | {"at_s": round(self.elapsed_s, 1)}, default=str)
        print(text, flush=True)
        self._file.write(text + "\n")
        self._file.flush()
