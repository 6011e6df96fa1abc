"""The identity of what a job has saved under a name, as plans and workers compare it. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from workloads.environment import environment_bytes
from workloads.models.saved import ATTEMPT, SAVED_BY, models_root, origin_of
from workloads.onnx_graphs.calibrations import calibrations_root
from workloads.training.adapters import adapters_root


class Saving(NamedTuple):
    """The attempt that saved what has a name now; empty where its note does not say."""

    saved_by: str = ""  # ids of the run and the job (``Request.saved_by``)
    attempt: int = 0  # its number; 0 in notes of earlier versions

    @property
    def identity(self) -> str:
        """No two savings have the same; "" where it is not known."""
        return f"{self.saved_by}-{self.attempt}" if self.saved_by and self.attempt else ""


# Products that jobs keep under a name for others: models, adapters, calibrations. No torch here.
#
# A name may come to stand for something else, when a job saves it anew. What was loaded or measured
# before that is of another product. The note beside a product tells by identity, not by moments,
# which clocks and copies make wrong: a training of hours would be run again.

#: The directory of each kind's names, on this machine.
_ROOTS: dict[str, Callable[[], Path]] = {
    "model": models_root,
    "adapter": adapters_root,
    "calibration": calibrations_root,
}


_MOST_KNOWN = 1024


class _Places:
    """The directories of names, as text. They follow from the environment, so as long as that stays
    they are found once: every job asks, and a short one takes no longer than they do."""

    def __init__(self) -> None:
        self._environment: dict[bytes, bytes] = {}
        self._known: dict[tuple[str, str], str] = {}

    def of(self, kind: str, name: str) -> str:
        """
        Raises:
            DataMissing: the cache directory cannot be made.
        """
        now = environment_bytes()
        if now != self._environment or len(self._known) >= _MOST_KNOWN:
            self._environment, self._known = now, {}
        known = self._known.get((kind, name))
        if known is None:
            place = os.path.join(_ROOTS[kind](), os.path.expanduser(name))
            known = self._known[kind, name] = os.fspath(place)
        return known


_places = _Places()


def saving_of(kind: str, name: object) -> Saving:
    """The saving of what has a name now, as far as anything of it is known on this machine."""
    if kind not in _ROOTS or not isinstance(name, str):
        return Saving()
    note = origin_of(_places.of(kind, name))
    attempt = note.get(ATTEMPT)
    return Saving(str(note.get(SAVED_BY, "")), attempt if isinstance(attempt, int) else 0)
