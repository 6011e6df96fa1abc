"""optimum-habana, made ready once in a process.

It replaces methods of transformers for the whole process, so only a process that was started for
this engine may call it: a stock transformers model beside it would no longer be stock
(``engines.process_kind`` keeps them apart). Importing it takes some ten seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from workloads.devices.base import Device
from workloads.errors import Unsupported

_PACKAGE = "optimum.habana"
_ready: list[str] = []


def prepare(device: Device) -> str:
    """Patch transformers for Gaudi, once; the library's version.

    Raises:
        Unsupported: this is no Gaudi card, or the package is not installed.
    """
    if device.name != "hpu":
        raise Unsupported(f"the engine optimum-habana runs on Gaudi cards (hpu), not {device.name}")
    if not installed():
        raise Unsupported(
            "the engine optimum-habana needs the package of that name, which is not installed "
            "here: pip install 'nightgrid[hpu]' -c constraints-hpu.txt"
        )
    if not _ready:
        device.synchronize()  # the bridge comes before the library, which looks for it
        with _pip_on_path(), contextlib.redirect_stdout(io.StringIO()):  # it prints by print
            from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

            adapt_transformers_to_gaudi()
        from optimum.habana.version import __version__

        _ready.append(str(__version__))
    return _ready[0]


def installed() -> bool:
    """Whether the package is there, without importing it."""
    try:
        return importlib.util.find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:  # there is no `optimum` either
        return False


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
