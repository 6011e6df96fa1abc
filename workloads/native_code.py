"""C++ of ours, made into machine code on the node that runs it, for that node's processor.

What a processor computes fast is not what is said in torch's operations one after the other. A
source file that comes with this package is compiled once by the node's own compiler, for the very
instructions that the processor has, and kept where compiled code of cards is kept. Where there is
no compiler, or it fails, whoever asks is told why and goes on without.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workloads.compiled_code import compiled_directory

#: Where the sources lie.
SOURCES = Path(__file__).with_name("native")
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

    @property
    def compiled(self) -> str:
        """The words of a row on compiling; empty where the code was there."""
        if not self.compile_s:
            return ""
        return f"compiled once in this process in {self.compile_s:.1f} s"


@cache
def native_code(source: Path) -> NativeCode:
    """The functions of a file of C++, compiled for this processor unless they are kept; once for
    each process. Takes 4 to 6 s of a core, and no more than two minutes; as long again where
    another process is at it. Of what it includes, headers beside it count as its own."""
    try:
        command = shlex.split(os.environ.get(COMPILER, "")) or ["g++"]
    except ValueError as error:
        return NativeCode(lacking=f"{COMPILER}: {error}")
    if shutil.which(command[0]) is None:
        return NativeCode(lacking=f"no compiler {command[0]} on this node")
    try:
        version = _output([*command, "--version"]).splitlines()[0]
        made_by = hashlib.sha256(
            "\0".join([version, *command, *_FLAGS, _processor()]).encode() + _text(source)
        ).hexdigest()
        compiling = [*command, *_FLAGS, str(source)]
        if directory := compiled_directory(f"native-{source.stem}-{made_by[:16]}"):
            return _kept(compiling, directory)
        with tempfile.TemporaryDirectory() as own:
            return _kept(compiling, own)
    except subprocess.TimeoutExpired:
        return NativeCode(lacking=f"{command[0]} was not done after {LIMIT_S:g} s")
    except subprocess.CalledProcessError as error:
        complaint = str(error.stderr).strip()[:_COMPLAINT]
        return NativeCode(lacking=f"{command[0]} failed with {error.returncode}: {complaint}")
    except (OSError, IndexError) as error:
        return NativeCode(lacking=f"{command[0]}: {error}")


def vector_code(source: Path) -> NativeCode:
    """As ``native_code``, of a file that is written for vectors of 512 bits."""
    import torch

    if not torch.cpu.get_capabilities().get("avx512_f"):
        return NativeCode(lacking="this processor has no AVX-512")
    return native_code(source)


def _text(source: Path) -> bytes:
    """Contents of a file and of the headers beside it."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    return b"\0".join(part for file in files for part in (file.name.encode(), file.read_bytes()))


def _kept(compiling: list[str], directory: str) -> NativeCode:
    """The library in a directory; one that is not there, was cut off or is another system's is
    made anew."""
    library = Path(directory) / "library.so"
    with contextlib.suppress(OSError):
        return NativeCode(library=ctypes.CDLL(str(library)))
    with _turn(directory):
        with contextlib.suppress(OSError):  # another process has made it meanwhile
            return NativeCode(library=ctypes.CDLL(str(library)))
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=directory) as aside:
            made = Path(aside) / "made.so"
            _output([*compiling, "-o", str(made)])
            os.replace(made, library)
        compile_s = time.perf_counter() - began
        return NativeCode(library=ctypes.CDLL(str(library)), compile_s=compile_s)


@contextlib.contextmanager
def _turn(directory: str) -> Iterator[None]:
    """One process of a node compiles; others wait, no longer than a compiler may take."""
    until = time.monotonic() + LIMIT_S
    held = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            while not _locked(held) and time.monotonic() < until:
                time.sleep(0.05)
        yield
    finally:
        os.close(held)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _output(command: list[str]) -> str:
    """The words of a command that succeeds; one that is given up is ended with its children."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            told, complaint = process.communicate(timeout=LIMIT_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, told, complaint)
    return told


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
