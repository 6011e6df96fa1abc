"""Run every test, in two pytest processes side by side: those that start Ray, and all others.

    python tools/run_tests.py [ARGUMENT OF PYTEST ...]

Tests on Ray wait for a good part of their time, for processes to start, nodes to be missed and jobs
to end; the others compute meanwhile. These step back a little, since most time limits are those of
tests on Ray. The mark ``ray`` divides the tests, so that each runs in exactly one of the two.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

NICENESS = 5  # of those without Ray, above our own


def run(arguments: Sequence[str]) -> int:
    """0 if both passed, else what one that did not ended with. What tests on Ray print is shown
    when the others, which print as they go, are done."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        on_ray = subprocess.Popen([*pytest, "-m", "ray"], stdout=output, stderr=subprocess.STDOUT)
        others = subprocess.Popen(["nice", "-n", str(NICENESS), *pytest, "-m", "not ray"])
        codes = [_end_of(others), _end_of(on_ray)]
        output.seek(0)
        print("\nTests on Ray, beside those above:", output.read(), sep="\n", flush=True)
    return next((code for code in codes if code), 0)


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. Ctrl-C reaches the process as well, which then ends in its own order."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
