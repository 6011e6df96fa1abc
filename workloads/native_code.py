"""C++ of ours, made into machine code on the node that runs it, for that node's processor.

What a processor computes fast is not what is said in torch's operations one after the other. A
source file that comes with this package is compiled once by the node's own compiler, for the very
instructions that the processor has, and kept where compiled code of cards is kept. Where there is
no compiler, or it fails, whoever asks is told why and goes on without.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workloads.compiled_code import compiled_directory

#: Names a compiler, as for make; with arguments, if need be.
COMPILER = "CXX"
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    # No math that changes results, such as sums in another order, beyond what the source says.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
LIMIT_S = 120.0
#: Characters of a compiler's complaint that are told.
_COMPLAINT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCode:
    """A source file's functions, or why there are none."""

    library: ctypes.CDLL | None = None
    compile_s: float = 0.0  # 0: it was there
    lacking: str = ""


@cache
def native_code(source: Path) -> NativeCode:
    """The functions of a file of C++, compiled for this processor unless they are kept; once for
    each process. Takes some ten seconds, and no more than two minutes."""
    command = shlex.split(os.environ.get(COMPILER, "")) or ["g++"]
    if shutil.which(command[0]) is None:
        return NativeCode(lacking=f"no compiler {command[0]} on this node")
    try:
        version = _output([*command, "--version"]).splitlines()[0]
        made_by = hashlib.sha256(
            "\0".join([version, *command, *_FLAGS, _processor()]).encode() + source.read_bytes()
        ).hexdigest()
        began = time.perf_counter()
        directory = compiled_directory(f"native-{source.stem}-{made_by[:16]}")
        with tempfile.TemporaryDirectory(dir=directory) as aside:
            library = Path(directory or aside) / "library.so"
            compile_s = 0.0
            if not library.exists():
                made = Path(aside) / "made.so"
                _output([*command, *_FLAGS, str(source), "-o", str(made)])
                os.replace(made, library)
                compile_s = time.perf_counter() - began
            return NativeCode(library=ctypes.CDLL(str(library)), compile_s=compile_s)
    except subprocess.TimeoutExpired:
        return NativeCode(lacking=f"{command[0]} was not done after {LIMIT_S:g} s")
    except subprocess.CalledProcessError as error:
        complaint = str(error.stderr).strip()[:_COMPLAINT]
        return NativeCode(lacking=f"{command[0]} failed with {error.returncode}: {complaint}")
    except (OSError, IndexError) as error:
        return NativeCode(lacking=f"{command[0]}: {error}")


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout


def _processor() -> str:
    """The instructions that the processor has: homes may be shared by nodes of several kinds."""
    found = [platform.machine()]
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                name = line.partition(":")[0].strip()
                if name in ("model name", "flags", "Features"):
                    found.append(line)
                elif not name:
                    break  # of the first processor
    except OSError:
        found.append(platform.processor())
    return "\0".join(found)
