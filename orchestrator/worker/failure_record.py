"""Conversion of an exception that a worker caught into the record that a row keeps.

The device says what its backend's words mean, secrets are taken out, and the frames are cleared:
their locals hold the job's tensors, and a card that is full stays full as long as they live.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import traceback
from typing import TYPE_CHECKING

from orchestrator.core.outcome import Failure, FailureClass, classify
from orchestrator.worker.redaction import redact
from workloads.base import OutOfMemory

if TYPE_CHECKING:
    from workloads.devices.base import Device

TAIL_LINES = 40
#: Messages of a refusal of memory by the kernel, besides MemoryError: torch's allocator, C++,
#: oneDNN without room for its code or buffers (its "primitive descriptor" is another thing), the
#: stack of a thread, the data of a library. Where not even the allocator's message found room, it
#: is the 15 bytes that need no block.
_REFUSED = re.compile(
    r"can't allocate memory|cannot allocate memory|bad_alloc|bad allocation"
    r"|could not create a (primitive|memory object|memory)\s*$"
    r"|can't start new thread|failed to map segment from shared object"
    r"|^\[enforce fail a$",
    re.IGNORECASE,
)


def describe(
    error: BaseException, *, device: Device | None, memory_bytes: int | None, node_name: str
) -> Failure:
    """Classify and describe an exception, then let go of its frames.

    ``memory_bytes`` is the enforced limit of an emulated card, None where there is no such limit;
    ``device`` is None when it was not opened yet.
    """
    known = _known(error, device, memory_bytes)
    failure_class = FailureClass.CRASH if isinstance(error, SystemExit) else classify(known)
    # Redacted before it is cut: half of a key is not recognised any more.
    message = one_line(redact(str(known), os.environ)) or redact(repr(error), os.environ)
    trace = redact("".join(traceback.format_exception(error)), os.environ)
    tail = trace.rstrip().splitlines()[-TAIL_LINES:]
    _let_go(error)
    return Failure(
        failure_class=failure_class,
        message=message,
        tail="\n".join(tail),
        log=_log_of_this_process(node_name),
    )


def one_line(text: str, limit: int = 2000) -> str:
    """The text with its white space collapsed, cut to ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _known(error: BaseException, device: Device | None, memory_bytes: int | None) -> BaseException:
    """The exception of a known class that stands for ``error``; itself when there is none."""
    if memory_bytes is not None and _memory_was_refused(error):
        return OutOfMemory(
            f"the emulated card's {memory_bytes:,} bytes are exhausted: "
            f"{one_line(str(error)) or type(error).__name__}"
        )
    return device.classify(error) if device is not None else error


def _memory_was_refused(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | ImportError) and bool(_REFUSED.search(str(error)))


def _let_go(error: BaseException) -> None:
    """Clear the frames of an exception and of those it came from."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        todo += [current.__cause__, current.__context__]
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None


def _log_of_this_process(node_name: str) -> str:
    """``host:path`` of the file that stderr goes to; empty when it is a terminal or a pipe."""
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/2")
        if os.path.isfile(path):
            return f"{node_name}:{path}"
    return ""
