"""``wandb``: Weights & Biases; one W&B run per job, grouped by run.

Files are in the run's directory under ``wandb``. Without a key they stay there (offline mode) for
``wandb sync``, unless WANDB_MODE is set. Needs the extra ``wandb``.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from orchestrator.trackers.base import TrackedRun, Tracker

#: Ids of complete runs, one per line: directories also exist for interrupted runs.
LEDGER = "nightgrid-logged.txt"


class _Project:
    """One project, and the files of one run."""

    def __init__(self, destination: str, run: str, directory: Path) -> None:
        import wandb

        self._entity, _, self._project = destination.rpartition("/")
        self._run = run
        self._directory = directory
        self._ledger = directory / "wandb" / LEDGER
        self._ledger.parent.mkdir(parents=True, exist_ok=True)  # not every version makes it
        has_key = os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False)
        self._mode = None if has_key else "offline"  # None: the environment decides
        self._known = set(self._ledger.read_text().split()) if self._ledger.exists() else set()

    def has(self, attempt: str) -> bool:
        """Return whether the ledger has the attempt."""
        return _id(attempt) in self._known

    def write(self, tracked: TrackedRun) -> None:
        """Write one run, and record it in the ledger when complete."""
        import wandb

        not_real = ("emulated", "random_weights", "synthetic_data")
        run = wandb.init(
            entity=self._entity or None,
            project=self._project,
            group=self._run,
            id=_id(tracked.attempt),
            name=tracked.name,
            tags=[name for name in not_real if tracked.tags.get(name) == "true"],
            config={**tracked.parameters, **tracked.tags, "started_at": tracked.started_at},
            mode=self._mode,
            dir=self._directory,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,  # of this machine, which may not be the card's
                x_disable_meta=True,
            ),
        )
        try:
            run.summary.update({**tracked.metrics, "ended_at": tracked.ended_at})
        except Exception:
            run.finish(exit_code=1)  # else it would stay open until this process ends
            raise
        run.finish(exit_code=0 if tracked.succeeded else 1)
        with self._ledger.open("a") as ledger:
            ledger.write(f"{_id(tracked.attempt)}\n")
        self._known.add(_id(tracked.attempt))


def _id(attempt: str) -> str:
    return hashlib.sha256(attempt.encode()).hexdigest()[:16]


SPEC = Tracker(
    name="wandb",
    title="Weights & Biases",
    package="wandb",
    destination="a project, wandb=[ENTITY/]PROJECT",
    variable="WANDB_PROJECT",
    default="nightgrid",
    connect=_Project,
    explain=lambda error, _: (
        f"{type(error).__name__}: {error}; WANDB_MODE=offline writes files alone"
    ),
)
