"""optimum-habana, made ready once in a process.

It replaces methods of transformers for the whole process, so only a process that was started for
this engine may call it: a stock transformers model beside it would no longer be stock
(``engines.process_kind`` keeps them apart). Importing it takes some ten seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from workloads.devices.base import Device

_ready: list[str] = []


def prepare(device: Device) -> str:
    """Patch transformers for Gaudi, once; the library's version."""
    if not _ready:
        device.synchronize()  # the bridge comes before the library, which looks for it
        with _pip_on_path(), contextlib.redirect_stdout(io.StringIO()):  # it prints by print
            from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

            adapt_transformers_to_gaudi()
        from optimum.habana.version import __version__

        _ready.append(str(__version__))
    return _ready[0]


@contextlib.contextmanager
def _pip_on_path() -> Iterator[None]:
    """The library asks ``pip list`` for the bridge's version when it is imported, and fails with
    an IndexError where PATH has no pip, or another environment's."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before
