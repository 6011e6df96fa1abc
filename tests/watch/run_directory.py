"""A run's directory as a driver makes it: real rows and a real status, a step at a time."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from driver_cases import STATUS
from measurements import row

from orchestrator.core.status import Rate, RunStatus
from orchestrator.store.store import Store


class RunDirectory:
    def __init__(self, results: Path, run: str = "night") -> None:
        self.store = Store(results, run)
        with self.store:
            pass

    def append(self, *numbers: int, **changes: Any) -> None:
        now = time.time()
        with self.store:
            self.store.append(
                *(row(n, **({"recorded_at": now + at} | changes)) for at, n in enumerate(numbers))
            )

    def status(self, **changes: Any) -> RunStatus:
        now = time.time()
        rates = (Rate(unit="tokens/s", per_s=1204.4, jobs=12),)
        usual = {"at": now, "started_at": now - 65, "rates": rates, "jobs_run": 15}
        status = dataclasses.replace(STATUS, **(usual | changes))
        self.store.write_file("status.json", status.to_json())
        return status
