"""A worker's exception becomes a record of the right class, and lets go of the job's memory."""

from __future__ import annotations

import errno
import gc
import weakref

import pytest

from orchestrator.core.outcome import FailureClass
from orchestrator.worker.worker import describe
from workloads.devices import device_for

REFUSALS = [
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a primitive"),
    RuntimeError("could not create a memory object"),
    RuntimeError("[enforce fail a"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", REFUSALS, ids=str)
def test_refused_memory_is_out_of_memory_on_a_card_with_a_limit(error: Exception) -> None:
    """However it surfaces, and the message says whose memory it was."""
    failure = describe(error, device=device_for("cpu"), memory_bytes=1000, node_name="n")
    assert failure.failure_class is FailureClass.OUT_OF_MEMORY
    assert "emulated card's 1,000 bytes" in failure.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
        RuntimeError("[enforce fail at tensor.h:91] wrong type"),
        RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
        OSError(errno.EACCES, "Permission denied"),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    """A limit does not turn every error into an exhausted memory."""
    failure = describe(error, device=device_for("cpu"), memory_bytes=1000, node_name="n")
    assert failure.failure_class is FailureClass.ERROR


def test_without_a_limit_a_primitive_is_no_memory() -> None:
    """Only where memory is limited by us do oneDNN's words mean that."""
    error = RuntimeError("could not create a primitive")
    failure = describe(error, device=device_for("cpu"), memory_bytes=None, node_name="n")
    assert failure.failure_class is FailureClass.ERROR


class _Tensor:
    """Stands for something large that a frame holds."""


def _fail(kept: list[weakref.ref[_Tensor]]) -> None:
    tensor = _Tensor()
    kept.append(weakref.ref(tensor))
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise RuntimeError("outer") from error


def test_the_frames_of_an_error_and_of_its_causes_are_let_go() -> None:
    """Nothing that the failed job held stays alive, even while the exception is at hand."""
    kept: list[weakref.ref[_Tensor]] = []
    try:
        _fail(kept)
    except RuntimeError as error:
        failure = describe(error, device=None, memory_bytes=None, node_name="n")
        gc.collect()
        assert kept[0]() is None
    assert "KeyError: 'inner'" in failure.tail and "RuntimeError: outer" in failure.tail
