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
from pathlib import Path

from workloads.devices.base import Device
from workloads.util.processes import variables

_ready: list[str] = []


def prepare(device: Device) -> str:
    """Patch transformers for Gaudi, once; the library's version."""
    if not _ready:
        device.synchronize()  # the bridge comes before the library, which looks for it
        # It runs ``pip list`` for the bridge's version when it is imported, and fails with an
        # IndexError where PATH has no pip, or another environment's.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        with variables({"PATH": path}), contextlib.redirect_stdout(io.StringIO()):
            from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

            adapt_transformers_to_gaudi()
        from optimum.habana.version import __version__

        _ready.append(str(__version__))
    return _ready[0]
