"""A process beside a driver that outlives it: it clears up when the driver is killed.

Ray's own agents look for their cluster for another minute, with their ports open. The guard waits
for the driver's end, of which its standard input tells; then it ends whatever still writes in the
driver's private directory, and removes that. A driver that ends in order has removed it before.
Should the guard be killed too, the next driver of this host does the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.worker.leftovers import VARIABLE, end_users_of
from workloads.owned_directory import OwnedDirectory, owned_directory

_PATIENCE_S = 60.0
_END_S = 10.0
_IN_ORDER = b"done\n"


@contextlib.contextmanager
def guarded(directory: OwnedDirectory) -> Iterator[None]:
    """Have the directory cleared up if this process is killed within the block."""
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE} | {"PYTHONPATH": paths}
    guard = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.worker.guard", str(directory.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,  # what a terminal sends its programs is not for the guard
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it was killed
            guard.stdin.write(_IN_ORDER)
            guard.stdin.close()
        try:
            guard.wait(_END_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()


def main(path: str) -> int:
    """Wait for the end of the driver; clear up its directory if it left it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as is sent to all when a host shuts down
    if sys.stdin.buffer.read() == _IN_ORDER:
        return 0
    deadline = time.monotonic() + _PATIENCE_S
    while (directory := owned_directory(Path(path))) is not None and time.monotonic() < deadline:
        if directory.is_abandoned:
            with contextlib.suppress(TimeoutError):
                end_users_of(directory)
                directory.remove()
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
