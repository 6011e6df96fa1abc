"""Base class of devices: operations on the one card of a process.

Accelerators run asynchronously: a call returns when work is queued, so timers need ``synchronize``
on both sides. ``classify`` maps each vendor's error texts to the classes of ``workloads.base``.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from workloads.base import (
    BadConfiguration,
    CardFaulty,
    CollectiveFailed,
    CompileFailed,
    NodeStorage,
    OutOfMemory,
    WorkloadError,
)
from workloads.devices import CardFacts, DeviceSpec, Texts
from workloads.devices.monitor.host import CardTelemetry, CardUse, occupation

# Compilation counters, and compiled code cached on a node's disk.
#
# Counters are read around a timed part: compiling a new graph takes seconds that do not belong to
# the model. Devices whose software caches compiled code get a directory by software and card under
# ``NIGHTGRID_COMPILED`` (default ``~/.cache/nightgrid-compiled``), which the software keeps below
# ``NIGHTGRID_COMPILED_MIB``; those unused for a month are removed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilations:
    """Compilations of a process up to a moment, or between two."""

    graphs: int | None = None  # None: not counted
    compile_s: float | None = None  # None: not measured
    recalled: int | None = None  # cache hits, in memory or on disk; None: not counted
    cpu_fallbacks: int | None = None  # operations that ran on the host instead
    named: Mapping[str, float] = field(default_factory=dict)  # by the software's names

    def since(self, earlier: Compilations) -> Compilations:
        """Return the growth since an earlier reading; unchanged counters are left out."""

        def growth(now: Any, before: Any) -> Any:
            return None if now is None or before is None else now - before

        grown = {name: n - earlier.named.get(name, 0) for name, n in self.named.items()}
        names = ("graphs", "compile_s", "recalled", "cpu_fallbacks")
        counts = {name: growth(getattr(self, name), getattr(earlier, name)) for name in names}
        return Compilations(**counts, named={name: n for name, n in grown.items() if n})

    def temperature(self) -> str:
        """Return "cold: …" or "cached: …" for a job's row; "" without graphs or compile times."""
        if self.graphs is None or self.compile_s is None:
            return ""
        if not self.graphs:
            return "cached: every graph was known" if self.recalled != 0 else ""
        return f"cold: {self.graphs} graphs compiled in {self.compile_s:.3g} s"

    def as_text(self) -> str:
        """Return the counters as one line, for a row."""
        return ", ".join(f"{name} {number:g}" for name, number in sorted(self.named.items()))


def torch_compilations() -> Compilations:
    """Count torch.compile's graphs with recompilations, and the seconds they took; does not import
    its compiler (seconds)."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
    times = getattr(dynamo, "compilation_time_metrics", {}).get("_compile.compile_inner", ())
    return Compilations(
        graphs=graphs,
        compile_s=float(sum(times)),  # tracing, the backend's own compiler and guards
        recalled=0,  # of its caches on disk it counts only some
        named={"torch_graphs": graphs},
    )


COMPILED_DIRECTORY, COMPILED_SIZE = "NIGHTGRID_COMPILED", "NIGHTGRID_COMPILED_MIB"
_SIZE_MIB = 8192
COMPILED_UNUSED_S = 30 * 86_400.0


def compiled_directory(made_by: str) -> str | None:
    """Create the directory for code by ``made_by`` (versions, card); None if it cannot exist."""
    if not made_by:
        return None
    root = Path(os.environ.get(COMPILED_DIRECTORY) or "~/.cache/nightgrid-compiled").expanduser()
    directory = root / re.sub(r"[^A-Za-z0-9._+-]+", "-", made_by)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory)
        now = directory.stat().st_mtime  # by the file system's clock
        for other in root.iterdir():
            with contextlib.suppress(OSError):
                old = now - other.stat().st_mtime > COMPILED_UNUSED_S
                if old and other.is_dir() and not other.is_symlink():
                    shutil.rmtree(other, ignore_errors=True)
    except OSError:
        return None  # the only cost is compiling again
    return str(directory.absolute())


def compiled_size_mib() -> int:
    """Return the size limit of a directory of compiled code; raises BadConfiguration."""
    size = os.environ.get(COMPILED_SIZE, "")
    if size and (not size.isdecimal() or int(size) < 1):
        raise BadConfiguration(
            f"{COMPILED_SIZE}={size!r} is not a size; give a whole number of MiB from 1"
        )
    return int(size or _SIZE_MIB)


#: Errors of torch on every device, by exception type and by message.
_COMMON_TYPES: Mapping[str, type[WorkloadError]] = {
    "OutOfMemoryError": OutOfMemory,  # torch.OutOfMemoryError, torch.cuda.…
    "DistBackendError": CollectiveFailed,
    "DistNetworkError": CollectiveFailed,
    "DistStoreError": CollectiveFailed,
    "BackendCompilerFailed": CompileFailed,
    "InductorError": CompileFailed,
    "TorchDynamoException": CompileFailed,
    "OutOfResources": CompileFailed,  # of Triton: a kernel wants more than a multiprocessor has
}
_COMMON_TEXTS: Texts = {
    CollectiveFailed: (
        "gloo/transport",
        "connection closed by peer",
        "watchdog caught collective operation timeout",
        "communicator was aborted",
        "wait timeout after",
    ),
}

_PREFLIGHT_ROWS, _PREFLIGHT_INNER = 256, 64
_PREFLIGHT_NUMBERS = 2**20

_HEADLINE_LENGTH = 2000

#: Host memory: torch's allocator with and without the source path in front, C++, mapped files.
_HOST_TEXTS: Texts = {
    OutOfMemory: (
        "defaultcpuallocator",
        "can't allocate memory: you tried to allocate",
        "cannot allocate memory",
        "std::bad_alloc",
        "killed due to the node running low on memory",  # by Ray
    ),
}

#: Storage of a node, of which /dev/shm is a part. Kernels' "shared memory" is the card's.
_NODE_TEXTS: Texts = {
    NodeStorage: (
        "no space left on device",
        "disk quota exceeded",
        "stale file handle",
        "stale nfs file handle",
        "workers are out of shared memory",
        "insufficient shared memory",
        "is killed by signal: bus error",
        "creating shared memory segment",  # NCCL
        "unable to write to file </torch_",
        "unable to open shared memory object",
        "failed writing file",  # PytorchStreamWriter
        "database or disk is full",
    ),
}
_NODE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO, errno.EROFS)


Answer = TypeVar("Answer")


class Device(ABC):
    """A handle on the one card of this process."""

    spec: ClassVar[DeviceSpec]
    collective_backend: ClassVar[str]  # torch.distributed's name
    compile_backend: ClassVar[str] = "inductor"  # of torch.compile
    compile_options: ClassVar[Mapping[str, Any]] = {}  # of the backend
    triton: ClassVar[bool] = False  # Triton supports it
    records: ClassVar[bool] = False  # ``record`` captures a graph

    @staticmethod
    def telemetry() -> Mapping[int, CardTelemetry]:
        """Read all cards of this host by index, acquiring none; must not import torch."""
        return {}

    @staticmethod
    def uuids() -> Mapping[int, str]:
        """Return the UUIDs of this host's cards by index, where cards are named by them."""
        return {}

    @staticmethod
    def use(card_index: int) -> CardUse | None:
        """Return the processes and memory on a card, without acquiring it; None if unavailable."""
        return None

    @staticmethod
    def inventory() -> Mapping[int, CardFacts]:
        """Return products and links of all cards by index, acquiring none; may take seconds."""
        return {}

    @staticmethod
    def compiler() -> str:
        """Return compiler versions and card product as a cache key; "" if no code is cached."""
        return ""

    @classmethod
    def occupied(cls, card_index: int, idle_bytes: int | None = None) -> str | None:
        """Return why not to take a card, None if free or unknown; ``idle_bytes``: when idle."""
        use = cls.use(card_index)
        return None if use is None else occupation(card_index, use, idle_bytes)

    def mismatch(self, card_index: int) -> str | None:
        """Compare the acquired card with the assigned one; None if equal or unknown."""
        return None

    @property
    def name(self) -> str:
        """The device's name among all devices."""
        return self.spec.name

    @property
    def torch_device(self) -> str:
        """torch's name of the card; a process sees one card, so its index is always 0."""
        return self.spec.torch_type

    @abstractmethod
    def device_name(self) -> str:
        """Return the product, e.g. "NVIDIA H200"; for CPUs the processor model."""

    @abstractmethod
    def driver_version(self) -> str:
        """Return the driver's version, "" if unknown; for CPUs the kernel's."""

    def configure(self) -> Mapping[str, str]:
        """Apply this device's settings before each job and return them for the row."""
        return {}

    def memory_details(self) -> Mapping[str, str]:
        """Return memory figures in bytes beyond the peak after a job, by name, for the row."""
        return {}

    def compilations(self) -> Compilations:
        """Return compilations so far: torch's, and the device's with ``compilation_counters``."""
        return torch_compilations()

    def stamp(self) -> Any:
        """Record a time in the card's queue (here the host's clock); None if that would block."""
        return time.perf_counter()

    def seconds_between(self, earlier: Any, later: Any) -> float | None:
        """Return the seconds between two stamps; call after ``synchronize``."""
        if earlier is None or later is None:
            return None
        return float(later - earlier)

    def seconds_in(self, pairs: Sequence[tuple[Any, Any]]) -> float | None:
        """Sum the seconds of all pairs of stamps, after ``synchronize``; None if one is unknown."""
        times = [self.seconds_between(earlier, later) for earlier, later in pairs]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None

    def fused_adamw(self, parameters: Sequence[Any], *, lr: float, weight_decay: float) -> Any:
        """Return the device's fused AdamW."""
        import torch

        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)

    def lacks(self, precision: str) -> str | None:
        """Return why this particular card lacks a precision of its kind; None if it has it."""
        return None

    def cannot_compile(self) -> str | None:
        """Return what torch.compile lacks here; None if it works."""
        return None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work``, which must not wait for the card, and return it as one launch to repeat."""
        work()
        return work

    def synchronize(self) -> None:  # noqa: B027 - doing nothing is right where there is no queue
        """Wait until all work queued on the card is done."""

    def preflight(self) -> None:
        """Copy and multiply integers on the card in milliseconds; CardFaulty if they differ from
        the host's, as all are exact in any precision (at most 256, bf16's last whole number)."""
        import torch

        draw = torch.Generator().manual_seed(0)
        left = torch.randint(-2, 3, (_PREFLIGHT_ROWS, _PREFLIGHT_INNER), generator=draw)
        right = torch.randint(-2, 3, (_PREFLIGHT_INNER, _PREFLIGHT_ROWS), generator=draw)
        known = left @ right
        pattern = torch.arange(_PREFLIGHT_NUMBERS, dtype=torch.int32)
        copied = pattern.to(self.torch_device)
        product = left.float().to(self.torch_device) @ right.float().to(self.torch_device)
        self.mark_step()
        self.synchronize()
        if not torch.equal(copied.cpu(), pattern):
            raise CardFaulty(f"of {_PREFLIGHT_NUMBERS:,} numbers some came back changed")
        right_ones = (product.cpu().double() - known).abs() < 0.5  # False for NaN
        wrong = int((~right_ones).sum())
        if wrong:
            raise CardFaulty(
                f"a product of {_PREFLIGHT_ROWS} x {_PREFLIGHT_INNER} matrices has {wrong:,} wrong "
                f"elements of {known.numel():,}"
            )

    def mark_step(self) -> None:  # noqa: B027 - doing nothing is right where there is no queue
        """End the current graph, on devices that collect operations before running them."""

    def memory_limit_bytes(self) -> int | None:
        """Return the card's memory; None if it is the host's."""
        return None

    def peak_memory_bytes(self) -> int | None:
        """Return peak device memory since ``reset_peak_memory``; None if it is the host's."""
        return None

    def reset_peak_memory(self) -> None:  # noqa: B027 - host memory is measured elsewhere
        """Reset the peak to the memory in use now."""

    def release_memory(self) -> None:
        """Release unreferenced memory, as far as the device allows."""
        gc.collect()

    def register_collective(self) -> None:  # noqa: B027 - torch knows most backends by itself
        """Import what makes ``collective_backend`` known to torch.distributed."""

    def seed(self, seed: int) -> None:
        """Seed Python, NumPy and torch on this device."""
        import numpy

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        self.seed_torch(seed)

    def seed_torch(self, seed: int) -> None:
        """Seed torch's generators, on the host and the card."""
        import torch

        torch.manual_seed(seed)

    def random_state(self) -> dict[str, Any]:
        """Return the random states that ``seed`` sets, as plain values that torch saves."""
        import numpy
        import torch

        kind, keys, *rest = numpy.random.get_state(legacy=True)
        card = self.card_random()
        return {
            "python": random.getstate(),
            "numpy": (kind, [int(key) for key in keys], *rest),
            "torch": torch.get_rng_state(),
            **({} if card is None else {"card": card.get_rng_state()}),
        }

    def restore_random_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of ``random_state``."""
        import numpy
        import torch

        version, keys, gauss = state["python"]
        random.setstate((version, tuple(keys), gauss))
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if (card := self.card_random()) is not None:
            card.set_rng_state(state["card"])

    def card_random(self) -> Any:
        """Return the module of the card's random state; None if torch's on the host is all."""
        return None

    def classify(self, error: BaseException) -> BaseException:
        """Return a known error as a ``WorkloadError`` to raise ``from`` it, any other unchanged."""
        if isinstance(error, WorkloadError):
            return error
        types = [kind.__name__ for kind in type(error).__mro__]
        kind = next((_COMMON_TYPES[name] for name in types if name in _COMMON_TYPES), None)
        if kind is OutOfMemory:
            return OutOfMemory(headline(error))
        code = error.errno if isinstance(error, OSError) else None
        if code in _NODE_ERRNOS:
            return NodeStorage(headline(error))
        if known := by_text(error, _NODE_TEXTS, OSError):
            return known
        no_memory = isinstance(error, MemoryError) or code == errno.ENOMEM
        if no_memory or by_text(error, _HOST_TEXTS):
            # Host memory: the job's own limit only if the device is the host.
            made = OutOfMemory if self.spec.host else MemoryError
            return error if type(error) is made else made(headline(error))
        # Texts before types: compilers and collectives wrap the error that stopped them.
        if known := by_text(error, self.spec.errors, AssertionError):  # torch without CUDA
            return known
        return kind(headline(error)) if kind else by_text(error, _COMMON_TEXTS) or error


def by_text(error: BaseException, texts: Texts, *more: type[BaseException]) -> WorkloadError | None:
    """Return the first class with a fragment in the message of a ``RuntimeError``, of a library's
    own exception or of one of ``more``."""
    kinds = type(error).__mro__
    root = kinds[kinds.index(Exception) - 1] if Exception in kinds else Exception
    if root.__module__ == "builtins" and not isinstance(error, (RuntimeError, *more)):
        return None
    if isinstance(error, WorkloadError):
        return None
    message = str(error).lower()
    # Devices of other packages may have pairs, among them several of one class.
    for kind, fragments in texts.items() if isinstance(texts, Mapping) else texts:
        if any(fragment in message for fragment in fragments):
            return kind(headline(error))
    return None


def headline(error: BaseException) -> str:
    """Return type and message on one line, cut at 2,000 characters (torch's have 400 to 700)."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_HEADLINE_LENGTH]


#: After this long a vendor's tool or library counts as hung.
HUNG_S = 10.0
#: Calls of tools that were given up, by tool: a driver that hangs may keep them for ever.
_GIVEN_UP: dict[str, subprocess.Popen[str]] = {}


def command_output(*command: str) -> str:
    """Return what a vendor's tool printed, its complaints at the end if it failed; "" if it is
    missing or hung. While a hung call lives on, the tool is not called again."""
    earlier = _GIVEN_UP.get(command[0])
    if earlier is not None and earlier.poll() is None:
        return ""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(command, **pipes, text=True, errors="replace")  # type: ignore[call-overload]
    except OSError:
        return ""
    try:
        printed, complaints = process.communicate(timeout=HUNG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _GIVEN_UP[command[0]] = process
        return ""
    return f"{printed}{complaints if process.returncode else ''}".strip()


def version_in(printed: str) -> str:
    """Return the first line of a tool's output that is a version; "" without one."""
    return next((line.strip() for line in printed.splitlines() if line[:1].isdigit()), "")


class LibraryCalls:
    """Calls a vendor's library in threads, one at a time. A call that hangs is given up, and there
    is no other until it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hung = False

    def call(self, function: Callable[[], Answer]) -> Answer | None:
        """Return what the function does; None if it hangs or fails."""
        if self._hung or not self._lock.acquire(timeout=HUNG_S):
            return None
        answers: list[Answer] = []

        def work() -> None:
            try:
                with contextlib.suppress(Exception):
                    answers.append(function())
            finally:
                self._hung = False
                self._lock.release()

        thread = threading.Thread(target=work, name="vendor-library", daemon=True)
        thread.start()
        thread.join(HUNG_S)
        self._hung = thread.is_alive()
        return answers[0] if answers else None


def installed_version(package: str) -> str:
    """Return a package's version by its pip name; "" if not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
