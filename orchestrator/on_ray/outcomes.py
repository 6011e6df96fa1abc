"""Outcomes that a node stores until the driver has synced their rows.

Rows wait in the driver while the results disk is full, and its agents die with it. So each agent
stores a rank's outcome on disk before sending it, and the run's next driver makes rows of those
that are left (``driver/recovery.py``). They are pickles in a directory that only this user enters,
each after the layout of its records (``layout_of``).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from orchestrator.core.outcome import RankOutcome
from orchestrator.core.topology import Node
from orchestrator.on_ray.channel import ask_nodes
from orchestrator.store.disk import digest
from orchestrator.util import output
from orchestrator.util.format import plural
from orchestrator.worker.cpu_slots import make_private
from orchestrator.worker.orphans import Owner
from orchestrator.worker.protocol import Ended, Run, pickled, unpickled

#: Age at which outcomes are deleted: the run will not be resumed.
FORGOTTEN_S = 7 * 24 * 3600.0
_ANSWER_S = 60.0


#: A stored outcome: one rank of an attempt, and its end.
KeptOutcome = tuple[Run, Ended]


class OutcomeKeeper:
    """Outcomes of one agent on its node's disk; none on a full disk or without an owner.

    Removes those of the run's earlier drivers, of which the owner has made rows.
    """

    def __init__(self, owner: Owner | None) -> None:
        self._directory = _directory_of(owner.run_id) if owner is not None else None
        self._prefix = f"{owner.invocation_id}." if owner is not None else ""
        if self._directory is not None:
            earlier = (p for p in self._directory.iterdir() if not p.name.startswith(self._prefix))
            _remove(earlier)

    def keep(self, request: Run, ended: Ended) -> None:
        """Store the outcome of a rank, if it has one."""
        if ended.outcome is None or self._directory is None:
            return
        path = self._directory / f"{self._prefix}{ended.attempt_id}.{request.rank}"
        try:
            aside = path.with_name(f"{path.name}.part")
            aside.write_bytes(_layout() + pickled((request, ended)))
            os.replace(aside, path)
        except OSError as error:
            output.say_aside(f"an outcome is not kept on this node: {error}")

    def durable(self, attempt_ids: Collection[str]) -> None:
        """Remove outcomes whose rows the driver has synced."""
        if self._directory is not None:
            for attempt_id in attempt_ids:
                _remove(self._directory.glob(f"{self._prefix}{attempt_id}.*"))

    def close(self) -> None:
        """Remove the directory if it is empty."""
        if self._directory is not None:
            with contextlib.suppress(OSError):
                self._directory.rmdir()


def kept_here(run_id: str) -> list[bytes]:
    """Stored outcomes of a run on this host."""
    directory, pickles = _directory_of(run_id), []
    for path in sorted(directory.iterdir()) if directory is not None else ():
        if path.suffix != ".part":
            with contextlib.suppress(OSError):
                pickles.append(path.read_bytes())
    return pickles


def kept_outcomes(nodes: Sequence[Node], run_id: str) -> Iterator[KeptOutcome]:
    """Outcomes of a run on this host and, in a cluster, on these nodes; skips silent ones, and
    counts for the user those whose records have other fields here."""
    import ray

    pickles = kept_here(run_id)
    if ray.is_initialized():
        answers = ask_nodes(kept_here, {node.node_id: (run_id,) for node in nodes}, _ANSWER_S)
        for answer in answers.values():
            pickles += answer if isinstance(answer, list) else ()
    layout, others = _layout(), 0
    for data in dict.fromkeys(pickles):
        if not data.startswith(layout):
            others += 1
            continue
        with contextlib.suppress(Exception):  # of another version
            yield unpickled(data[len(layout) :])
    if others:
        output.say_aside(
            f"{plural(others, 'outcome')} kept by another version of Nightgrid: left out, "
            "those jobs are measured again"
        )


@cache
def layout_of(*records: type) -> bytes:
    """Digest of the fields of these records and of those in them, in order: a pickle has values by
    position, which a version with other fields would take for those of other names."""
    fields_of: dict[type, list[str]] = {}
    unseen: list[Any] = list(records)
    while unseen:
        kind = unseen.pop()
        unseen += get_args(kind)
        if isinstance(kind, type) and is_dataclass(kind) and kind not in fields_of:
            fields_of[kind] = [field.name for field in fields(kind)]
            unseen += get_type_hints(kind).values()
    lines = sorted(f"{kind.__qualname__} {names}" for kind, names in fields_of.items())
    return digest("\n".join(lines).encode()).encode()


def _layout() -> bytes:
    return layout_of(Run, Ended, RankOutcome)


def _directory_of(run_id: str) -> Path | None:
    """A run's private directory of outcomes on this host; None if it cannot be made."""
    base = Path(tempfile.gettempdir(), f"nightgrid-outcomes-{os.getuid()}")
    directory = base / run_id
    try:
        make_private(base)
        make_private(directory)
    except OSError as error:
        output.say_aside(f"outcomes are not kept: {error}")
        return None
    for run in base.iterdir():
        is_forgotten = run != directory and _age_s(run) > FORGOTTEN_S
        _remove(path for path in run.glob("*") if _age_s(path) > FORGOTTEN_S)
        if is_forgotten:
            with contextlib.suppress(OSError):  # it has younger outcomes
                run.rmdir()
    return directory


def _age_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _remove(paths: Iterator[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
