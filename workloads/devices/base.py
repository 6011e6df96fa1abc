"""The class behind a device: what a workload may ask of the card that its process has.

Accelerators run behind the host: a call returns when work is queued, not when it is done. So a
timer around it is right only with ``synchronize`` on both sides. They also fail each in their own
words; ``classify`` turns those words into the classes of ``workloads.base``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from workloads.base import (
    BadConfiguration,
    CardFaulty,
    CollectiveFailed,
    CompileFailed,
    OutOfMemory,
    WorkloadError,
)
from workloads.devices import DeviceSpec, Texts
from workloads.devices.monitor.host import CardInventory, CardTelemetry, CardUse, occupation

if TYPE_CHECKING:
    import torch


# Compilation: what this process has compiled so far, and compiled code kept on a node's disk.
#
# Counters are read before and after a timed part: a step that met a new graph took seconds that are
# no property of the model. torch.compile counts its graphs in every process; a device whose
# software compiles as well adds counters of its own (``Device.compilations``).
#
# Compiling a model for a card may take longer than measuring it, so a device whose software keeps
# what it compiled gets a directory for that, by the software and the card that made it, on a local
# disk under ``NIGHTGRID_COMPILED`` (default ``~/.cache/nightgrid-compiled``). The software itself
# keeps each directory below ``NIGHTGRID_COMPILED_MIB``; those unused for a month are removed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilations:
    """Compilations of a process up to a moment, or between two."""

    graphs: int | None = None  # None: nobody counts them
    compile_s: float | None = None  # time to make them; None: nobody measures it
    recalled: int | None = None  # graphs that were known, here or on disk; None: nobody counts
    cpu_fallbacks: int | None = None  # operations that a card left to the host
    named: Mapping[str, float] = field(default_factory=dict)  # by the software's own names

    def since(self, earlier: Compilations) -> Compilations:
        """The growth since an earlier reading; counters that did not move are left out."""

        def growth(now: Any, before: Any) -> Any:
            return None if now is None or before is None else now - before

        grown = {name: n - earlier.named.get(name, 0) for name, n in self.named.items()}
        return Compilations(
            graphs=growth(self.graphs, earlier.graphs),
            compile_s=growth(self.compile_s, earlier.compile_s),
            recalled=growth(self.recalled, earlier.recalled),
            cpu_fallbacks=growth(self.cpu_fallbacks, earlier.cpu_fallbacks),
            named={name: n for name, n in grown.items() if n},
        )

    def temperature(self) -> str:
        """Tell if a job had to compile, for its row: cold, or cached where every graph was known.
        Empty where nobody measures how long compiling takes, and where there was no graph."""
        if self.graphs is None or self.compile_s is None:
            return ""
        if not self.graphs:
            return "cached: every graph was known" if self.recalled != 0 else ""
        return f"cold: {self.graphs} graphs compiled in {self.compile_s:.3g} s"

    def as_text(self) -> str:
        """The counters as one line, for a row."""
        return ", ".join(f"{name} {number:g}" for name, number in sorted(self.named.items()))


def torch_compilations() -> Compilations:
    """The graphs that torch.compile has made here, those of recompilations included; 0 as long as
    nothing was compiled. torch's compiler is not imported for it, which takes seconds."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
    return Compilations(graphs=graphs, named={"torch_graphs": graphs})


COMPILED_DIRECTORY, COMPILED_SIZE = "NIGHTGRID_COMPILED", "NIGHTGRID_COMPILED_MIB"
_SIZE_MIB = 8192
COMPILED_UNUSED_S = 30 * 86_400.0


def compiled_directory(made_by: str) -> str | None:
    """Directory for code of this software and card, made if need be; None where it cannot be.

    ``made_by`` has versions and card in words; empty: nothing is compiled that could be kept.
    """
    if not made_by:
        return None
    root = Path(os.environ.get(COMPILED_DIRECTORY) or "~/.cache/nightgrid-compiled").expanduser()
    directory = root / re.sub(r"[^A-Za-z0-9._+-]+", "-", made_by)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory)
        _remove_unused(root, directory.stat().st_mtime)
    except OSError:
        return None  # code is compiled anew, no more
    return str(directory.absolute())


def compiled_size_mib() -> int:
    """Size limit of each directory of a kind of process, in MiB.

    Raises:
        BadConfiguration: ``NIGHTGRID_COMPILED_MIB`` is no whole number above 0.
    """
    size = os.environ.get(COMPILED_SIZE, "")
    if size and (not size.isdecimal() or int(size) < 1):
        raise BadConfiguration(
            f"{COMPILED_SIZE}={size!r} is not a size; give a whole number of MiB from 1"
        )
    return int(size or _SIZE_MIB)


def _remove_unused(root: Path, now: float) -> None:  # as the disk's own clock has it
    """Remove directories of releases and cards that no process has been started with for long."""
    for directory in root.iterdir():
        with contextlib.suppress(OSError):
            old = now - directory.stat().st_mtime > COMPILED_UNUSED_S
            if old and directory.is_dir() and not directory.is_symlink():
                shutil.rmtree(directory, ignore_errors=True)


#: What torch itself says on every device, by type of exception and by message.
_COMMON_TYPES: Mapping[str, type[WorkloadError]] = {
    "OutOfMemoryError": OutOfMemory,  # torch.OutOfMemoryError, torch.cuda.…
    "DistBackendError": CollectiveFailed,
    "DistNetworkError": CollectiveFailed,
    "DistStoreError": CollectiveFailed,
    "BackendCompilerFailed": CompileFailed,
    "InductorError": CompileFailed,
    "TorchDynamoException": CompileFailed,
}
_COMMON_TEXTS: tuple[Texts, ...] = (
    (
        CollectiveFailed,
        (
            "gloo/transport",
            "connection closed by peer",
            "watchdog caught collective operation timeout",
            "communicator was aborted",
            "wait timeout after",
        ),
    ),
)

_PREFLIGHT_ROWS, _PREFLIGHT_INNER = 256, 64
_PREFLIGHT_NUMBERS = 2**20

_HEADLINE_LENGTH = 2000

#: torch's host allocator, with and without the path of its source file before it.
_HOST_TEXTS: tuple[Texts, ...] = (
    (OutOfMemory, ("defaultcpuallocator", "can't allocate memory: you tried to allocate")),
)


#: Tensors on their way to a card, and what tells that they are there (an event).
Copies: TypeAlias = "tuple[Sequence[torch.Tensor], Any]"


class SideCopies(Protocol):
    """A way to the card beside its work: copies from page-locked memory that nobody waits for."""

    def begin(self, tensors: Sequence[torch.Tensor]) -> Copies:
        """Queue copies of these tensors, and return before they are done."""

    def arrived(self, copies: Copies) -> Sequence[torch.Tensor]:
        """The copies; the card's work that is queued from now on waits for them, the host does
        not."""


class Device(ABC):
    """A handle on the one card that this process uses."""

    spec: ClassVar[DeviceSpec]
    collective_backend: ClassVar[str]  # between such cards, as torch.distributed calls it
    compile_backend: ClassVar[str] = "inductor"  # to which torch.compile hands graphs
    compile_options: ClassVar[Mapping[str, Any]] = {}  # of that backend
    triton: ClassVar[bool] = False  # whether Triton writes kernels for it
    records: ClassVar[bool] = False  # whether ``record`` makes one launch of many

    @staticmethod
    def telemetry() -> Mapping[int, CardTelemetry]:
        """All cards of this host by index, as ``environment_for`` counts them, asked from outside:
        no card is acquired, torch is not imported. Empty where nothing can be found out."""
        return {}

    @staticmethod
    def use(card_index: int) -> CardUse | None:
        """Processes and memory on this card now, asked from outside as ``telemetry`` is; None where
        nothing can be found out."""
        return None

    @staticmethod
    def inventory() -> Mapping[int, CardInventory]:
        """Products and links of this host's cards by index, for the doctor; no card is acquired,
        and it may take seconds. Empty where nothing can be found out."""
        return {}

    @staticmethod
    def compiler() -> str:
        """The software that compiles for the cards of this host, with its versions, and their
        product: what compiled code may be kept by. Empty where none is kept; no card is acquired.
        """
        return ""

    @classmethod
    def occupied(cls, card_index: int, idle_bytes: int | None = None) -> str | None:
        """Reason why no process should take this card now; None where it is free, and where nothing
        can be found out. ``idle_bytes``: what it has in use when it is idle, if that is known."""
        use = cls.use(card_index)
        return None if use is None else occupation(card_index, use, idle_bytes)

    def mismatch(self, card_index: int) -> str | None:
        """Difference between the card that this process acquired and the one it was given; None
        where they are the same, or nobody can tell."""
        return None

    @property
    def name(self) -> str:
        """The device's name among all devices."""
        return self.spec.name

    @property
    def torch_device(self) -> str:
        """Name of the device for torch; a process sees one card, so its index is always 0."""
        return self.spec.torch_type

    @abstractmethod
    def device_name(self) -> str:
        """The product, e.g. "NVIDIA H200"; for CPUs the model of the processor."""

    @abstractmethod
    def driver_version(self) -> str:
        """Version of the driver, "" where it cannot be found out; for CPUs the kernel's."""

    def configure(self) -> Mapping[str, str]:
        """Put this device's settings in force in this process and name them, for the row. Called
        before each job, since the last one may have changed them."""
        return {}

    def memory_details(self) -> Mapping[str, str]:
        """Memory of this process and of its card beyond ``peak_memory_bytes``, by name and in
        bytes, for the row; asked when a job has ended and still holds what it took."""
        return {}

    def compilations(self) -> Compilations:
        """Compilations of this process so far: by torch.compile, and by the device's own software
        where it has the capability ``compilation_counters``."""
        return torch_compilations()

    def stamp(self) -> Any:
        """A moment in the card's own order of work, for ``seconds_between``; None where the card
        cannot tell moments without waiting. Here the host's clock, since it does the work."""
        return time.perf_counter()

    def seconds_between(self, earlier: Any, later: Any) -> float | None:
        """Time between two stamps, after ``synchronize``."""
        if earlier is None or later is None:
            return None
        return float(later - earlier)

    def seconds_in(self, pairs: Sequence[tuple[Any, Any]]) -> float | None:
        """Time in all these pairs of stamps, after ``synchronize``; None if one cannot be told."""
        times = [self.seconds_between(earlier, later) for earlier, later in pairs]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None

    def fused_adamw(self, parameters: Sequence[Any], *, lr: float, weight_decay: float) -> Any:
        """The device's AdamW that does all of an update in one pass."""
        import torch

        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)

    def lacks(self, precision: str) -> str | None:
        """Reason why this very card lacks a precision that its kind has; None where it has it."""
        return None

    def cannot_compile(self) -> str | None:
        """Name what torch.compile lacks here; None where it can work."""
        return None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work``, which never waits for the card, and make of what it queues one launch,
        to be queued as often as wanted. Here ``work`` itself."""
        work()
        return work

    def side_copies(self) -> SideCopies:
        """A new way to the card beside its work, where it has the capability ``side_copies``."""
        raise NotImplementedError(f"{self.name} copies nothing beside its work")

    def synchronize(self) -> None:  # noqa: B027 - doing nothing is right where there is no queue
        """Wait until everything queued on the card is done."""

    def preflight(self) -> None:
        """Let the card remember and compute something of which the right answer is known.

        The matrices hold small integers, so that products and sums are exact in every precision
        that a card may choose for them (none exceeds 256, bf16's last whole number), and the host
        computes the same in integers. A card that rounds differently passes, one that is wrong by
        one does not. Few milliseconds once the device's libraries are loaded.

        Raises:
            CardFaulty: the answer is another one.
        """
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
        right_ones = (product.cpu().double() - known).abs() < 0.5  # no number is no right one
        wrong = int((~right_ones).sum())
        if wrong:
            raise CardFaulty(
                f"a product of {_PREFLIGHT_ROWS} x {_PREFLIGHT_INNER} matrices has {wrong:,} wrong "
                f"elements of {known.numel():,}"
            )

    def mark_step(self) -> None:  # noqa: B027 - doing nothing is right where there is no queue
        """Cut the graph here, on devices that collect operations before running them."""

    def memory_limit_bytes(self) -> int | None:
        """Memory of the card, None where it is the host's."""
        return None

    def peak_memory_bytes(self) -> int | None:
        """Most device memory in use since ``reset_peak_memory``, None where it is the host's."""
        return None

    def reset_peak_memory(self) -> None:  # noqa: B027 - the host's peak is not the device's to reset
        """Start the peak over from what is in use now."""

    def release_memory(self) -> None:
        """Give back what is no longer referenced, as far as the device allows."""
        gc.collect()

    def register_collective(self) -> None:  # noqa: B027 - torch knows most backends by itself
        """Make ``collective_backend`` known to torch.distributed, where that takes an import."""

    def seed(self, seed: int) -> None:
        """Make Python, NumPy and torch on this device start from the same random state."""
        import numpy

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        self.seed_torch(seed)

    def seed_torch(self, seed: int) -> None:
        """Seed torch's generators, of the host and of the card."""
        import torch

        torch.manual_seed(seed)

    def random_state(self) -> dict[str, Any]:
        """The random states that ``seed`` sets, as plain values that torch saves."""
        import numpy
        import torch

        kind, keys, *rest = numpy.random.get_state(legacy=True)
        return {
            "python": random.getstate(),
            "numpy": (kind, [int(key) for key in keys], *rest),
            "torch": torch.get_rng_state(),
        }

    def restore_random_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the random numbers that follow such a state."""
        import numpy
        import torch

        version, keys, gauss = state["python"]
        random.setstate((version, tuple(keys), gauss))
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])

    def classify(self, error: BaseException) -> BaseException:
        """This error as a ``WorkloadError`` if it is a known one, else unchanged.

        The new error carries the old one's message; raise it ``from`` the old one.
        """
        if isinstance(error, WorkloadError):
            return error
        for kind in type(error).__mro__:
            if kind.__name__ in _COMMON_TYPES:
                return _COMMON_TYPES[kind.__name__](headline(error))
        if isinstance(error, MemoryError) or by_text(error, _HOST_TEXTS):
            # The host's memory, which is a job's own limit only where it is the device's.
            made = OutOfMemory if self.spec.host else MemoryError
            return error if type(error) is made else made(headline(error))
        return by_text(error, (*self.spec.errors, *_COMMON_TEXTS)) or error


def by_text(error: BaseException, table: Sequence[Texts]) -> WorkloadError | None:
    """The first class in the table whose fragments occur in the message of a ``RuntimeError``."""
    if not isinstance(error, RuntimeError):
        return None
    message = str(error).lower()
    for kind, fragments in table:
        if any(fragment in message for fragment in fragments):
            return kind(headline(error))
    return None


def headline(error: BaseException) -> str:
    """A message on one line, up to 2,000 characters, with the exception's type before it: torch's
    text on memory has 400 to 700, and its advice stands at the end."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_HEADLINE_LENGTH]


def command_output(*command: str) -> str:
    """Output of a vendor's tool, "" if it is missing, fails or does not answer in 10 s."""
    import subprocess

    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def installed_version(package: str) -> str:
    """Version of an installed package, as pip calls it; "" where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
