"""A wall clock of the driver's own that can be stepped while it runs (``clock_step.c``)."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_step.c")
STEP_S = 7200


@dataclass(slots=True)
class SteppedClock:
    """The time of day for a process that was started with ``environment``."""

    offset: Path
    library: Path

    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "CHAOS_CLOCK": str(self.offset)}

    def step(self, seconds: int) -> None:
        """Let it be so many seconds later than it truly is (earlier, if negative)."""
        with self.offset.open("r+b", buffering=0) as file:
            file.write(struct.pack("l", seconds))


def stepped_clock(directory: Path) -> SteppedClock | None:
    """Build one in a directory; None where there is no C compiler for Linux's libraries."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    clock = SteppedClock(offset=directory / "clock", library=directory / "clock_step.so")
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(clock.library), str(SOURCE), "-ldl"],
        capture_output=True,
    )
    if built.returncode != 0:
        return None
    clock.offset.write_bytes(struct.pack("l", 0))
    return clock
