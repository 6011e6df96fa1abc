"""Run attempts on one card in a long-lived process.

A worker imports once (about ten seconds), keeps the last model for the next job with an equal
residency key, and restores the process state before each job. Failures become a ``RankOutcome``:
``run`` does not raise. No Ray here; an agent owns the process (``process.py``, ``local.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import re
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import Progress, RecordRow
from orchestrator.core.job import Job, State
from orchestrator.core.outcome import (
    Attempt,
    Failure,
    FailureClass,
    Outcome,
    RankOutcome,
    WorkerInfo,
    classify,
)
from orchestrator.core.plan import LOST, TOOK
from orchestrator.core.readings import ProcessorReading, Turn, use_between
from orchestrator.core.settings import FIELDS
from orchestrator.grid.dependencies import things, took
from orchestrator.store.codec import row_of
from orchestrator.store.schema import RAW_TYPES
from orchestrator.util.format import one_line
from orchestrator.util.host import Interval, usable_cores
from orchestrator.util.redaction import redact
from orchestrator.worker.cpu_slots import cpu_slot, processor_reading
from orchestrator.worker.environment import versions
from orchestrator.worker.memory_limit import MemoryLimit
from orchestrator.worker.orphans import Owner
from orchestrator.worker.protocol import WorkerConfig
from workloads import base, registry
from workloads.alone import SEED
from workloads.bench.collective import Listener, OneCard, Rendezvous, joined, listen
from workloads.devices import device_for
from workloads.devices.base import Device, by_text
from workloads.devices.monitor.host import ReleaseWait
from workloads.engines import ENGINES
from workloads.isolation import ProcessState, ResidentModel
from workloads.models.products import saving_of

_FREE_POLL_S = 0.5  # between two looks at a card that is not free yet
_ONE_CARD = OneCard()


class CardWorker:
    """Runs attempts on one card, one at a time. Only ``progress`` may be called meanwhile."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.device: Device | None = None
        self._info: WorkerInfo | None = None
        self._clean_state: ProcessState | None = None
        self._limit: MemoryLimit | None = None
        self._resident = ResidentModel()
        self._listener: Listener | None = None
        self._progress: Progress | None = None
        self._timed_from: ProcessorReading | None = None
        self._timed_until: ProcessorReading | None = None
        self._turn: Turn | None = None
        self._card_check: dict[str, float] | None = None
        self._cores = usable_cores()
        self._jobs_before = 0

    def start(self) -> WorkerInfo:
        """Import what jobs need, acquire the card, and describe this process.

        Raises BadConfiguration if a variable is missing that must be set before imports;
        CardNotAcquired if the card is absent or in use; CardFaulty if it computes wrong results;
        ImportError if torch, transformers or the device's software is missing.
        """
        self._verify_environment()
        self.device = device_for(self.config.device)
        self.wait_until_free(self.device)
        # Nothing that could take the card is imported before it is free.
        import torch
        import transformers  # noqa: F401 - paid for here, not in the first job

        torch.set_num_threads(self.config.threads)
        device_name = self.acquire(self.device)
        self._verify_card(self.device)
        spec = self.config.card.accelerator.spec
        visible = os.environ.get(spec.visible_variable, "")
        if self.config.uuid:  # the card is taken; vLLM and others read a number here
            os.environ |= spec.visible(self.config.card.index)
        _warm_thread_pools()
        self._clean_state = ProcessState.now()
        if self.config.emulated and self.config.memory_bytes is not None:
            self._limit = MemoryLimit.above_baseline(self.config.memory_bytes)
        self._info = WorkerInfo(
            worker_id=self.config.worker_id,
            node_name=self.config.node_name,
            pid=os.getpid(),
            device_name=device_name,
            driver_version=self.device.driver_version(),
            emulated=self.config.emulated,
            visible_cards=visible,
            threads=torch.get_num_threads(),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            cores=len(self._cores),
            versions=versions(),
        )
        return self._info

    def listen(self, address: str, timeout_s: float = 300.0) -> Rendezvous:
        """Open the next attempt's rendezvous (rank 0) on an address that other ranks reach."""
        self._listener = listen(address, self.config.world_size, timeout_s)
        return self._listener.rendezvous

    def run(
        self, attempt: Attempt, rank: int = 0, rendezvous: Rendezvous | None = None
    ) -> RankOutcome:
        """Run one rank of an attempt to its end. Never raises ``Exception``."""
        lasted = Interval()
        self._timed_from = self._timed_until = self._turn = self._card_check = None
        self._resident.was_used = False
        result, failure = None, None
        assert self.device is not None, "the worker was not started"
        try:
            result = self._run(attempt, rank, rendezvous, self.device)
        except (Exception, SystemExit) as error:
            failure = self.failure(error, engine=attempt.job.engine)
        if failure is not None:
            # The exception's frames, which referenced the job's tensors, are cleared.
            self._resident.drop()
            # A broken card may fail here too; the failure already says so.
            with contextlib.suppress(Exception):
                self._release_memory()
        self._progress = None
        self._listener = None
        timed = self._timed_from, self._timed_until
        outcome = RankOutcome(
            rank=rank,
            state=_STATES.get(failure.failure_class if failure else None, State.FAILED),
            started_at=lasted.started_at,
            ended_at=lasted.until_now(),
            result=result,
            failure=failure,
            worker=self._info,
            jobs_before=self._jobs_before,
            model_was_resident=self._resident.was_used,
            timed=(timed[0].at, timed[1].at) if timed[0] and timed[1] else None,
            processor=use_between(timed[0], timed[1]) if timed[0] and timed[1] else None,
            turn=self._turn,
            card_check=self._card_check,
        )
        self._jobs_before += 1
        return outcome

    def progress(self) -> Progress | None:
        """The current activity of ``run``, from any thread; None when idle."""
        return self._progress

    def failure(self, error: BaseException, engine: str = "") -> Failure:
        """Describe an exception from ``start``, or from a job of this engine, as a Failure."""
        return describe(
            error,
            device=self.device,
            memory_bytes=self._limit.memory_bytes if self._limit else None,
            node_name=self.config.node_name,
            engine=engine,
        )

    # ------------------------------------------------------------ taking the card

    def wait_until_free(self, device: Device) -> None:
        """Wait until the card is idle; raise CardNotAcquired if it is not in time."""
        card = self.config.card
        waiting = ReleaseWait(card_index=card.index, idle_bytes=self.config.idle_memory_bytes)
        while (reason := waiting.reason(time.monotonic(), device.use(card.index))) is not None:
            if waiting.is_over(now := time.monotonic()):
                raise base.CardNotAcquired(f"{card} is not free {waiting.duration(now)}: {reason}")
            time.sleep(_FREE_POLL_S)

    def acquire(self, device: Device) -> str:
        """Allocate on the card, so that a missing one fails now; return its product name."""
        import torch

        try:
            device.synchronize()  # first: on Gaudi this is what makes torch know "hpu"
            torch.zeros(1, device=device.torch_device)
            return device.device_name()
        except Exception as error:
            known = device.classify(error)
            if isinstance(known, base.CardNotAcquired | base.CardFaulty):
                raise known from error
            raise base.CardNotAcquired(
                f"{self.config.card} cannot be used: {one_line(str(error), 2000) or repr(error)}"
            ) from error

    def _verify_card(self, device: Device) -> None:
        """Verify that the acquired card is the assigned one and that it computes correctly.

        An import may change the visible-cards variable and so select another card. Each process
        checks the arithmetic: the card may have broken the previous one.
        """
        card = self.config.card
        self._verify_environment()
        if (why := device.mismatch(card.index)) is not None:
            raise base.CardNotAcquired(f"this process has not got {card}: {why}")
        try:
            device.preflight()
        except base.CardFaulty as error:
            raise base.CardFaulty(f"{card} is faulty: {error}") from error
        except Exception as error:
            known = device.classify(error)
            message = f"{card} cannot compute: {one_line(str(known), 2000) or repr(known)}"
            raise base.CardFaulty(message) from error
        device.release_memory()

    def _verify_environment(self) -> None:
        wrong = [
            f"{name} is {os.environ.get(name)!r} and should be {wanted!r}"
            for name, wanted in sorted(self.config.environment.items())
            if os.environ.get(name) != wanted
        ]
        if wrong:
            raise base.BadConfiguration(
                f"worker {self.config.worker_id} runs in a wrong environment: " + "; ".join(wrong)
            )

    # ------------------------------------------------------------ parts of a run

    def _run(
        self, attempt: Attempt, rank: int, rendezvous: Rendezvous | None, device: Device
    ) -> base.Result:
        assert self._clean_state is not None
        self._enter(attempt.attempt_id, "start")
        if attempt.job.process_kind != self.config.kind:
            raise base.BadConfiguration(
                f"the job needs a process of kind {attempt.job.process_kind or 'ordinary'!r} and "
                f"this one is {self.config.kind or 'ordinary'!r}; run it on a cluster or with "
                "--emulate, where each kind gets a process of its own"
            )
        self._clean_state.restore()
        device.seed(SEED)
        self._resident.clean()
        settings = device.configure()
        request = request_of(attempt)
        threads = self._set_threads(request.parameters.get("threads"))
        with (
            self._collective(attempt, rank, rendezvous, device) as collective,
            self._slot(attempt, rank, collective, threads) as self._turn,
        ):
            self._enter(attempt.attempt_id, "start")
            if self.config.check_card and not self._jobs_before:
                self._card_check = self._check_card(device, len(attempt.cards))
            workload = registry.load(attempt.job.workload)
            context = base.JobContext(
                device=device,
                rank=rank,
                world_size=len(attempt.cards),
                collective=collective,
                enter_phase=lambda phase: self._enter(attempt.attempt_id, phase),
                resident=self._load_resident,
                clock=time.perf_counter,
                cpu_clock=time.process_time,
            )
            known = device.compilations()
            with self._limit.in_force() if self._limit else contextlib.nullcontext():
                result = workload(request, context)
            compiled = device.compilations().since(known)
        if not isinstance(result, base.Result):
            raise TypeError(
                f"workload {attempt.job.workload} gave back {type(result).__name__}, not a Result"
            )
        self._enter(attempt.attempt_id, "finish")
        limit = self._limit.memory_bytes if self._limit else device.memory_limit_bytes()
        details = {
            **settings,
            **device.memory_details(),
            **({} if limit is None else {"card_memory_bytes": str(limit)}),
            **({"compile_cache": cache} if (cache := compiled.temperature()) else {}),
            **({TOOK: request.took} if request.took else {}),
            **({LOST: "; ".join(self.config.lost_cards)} if self.config.lost_cards else {}),
            **result.details,
        }
        environment = dict(os.environ)  # copied once, not for each detail
        result = dataclasses.replace(
            result,
            compile_s=result.compile_s or compiled.compile_s or 0.0,
            metrics={str(name): float(value) for name, value in result.metrics.items()},
            details={name: redact(text, environment) for name, text in details.items()},
        )
        _verify_row(attempt, rank, result)
        return result

    def _set_threads(self, requested: int | None) -> int:
        """Set torch's threads to the requested number, else leave this worker's share."""
        import torch

        assert self._info is not None
        if requested is not None and requested != torch.get_num_threads():
            torch.set_num_threads(requested)
            _warm_thread_pools()
        threads = torch.get_num_threads()
        if threads != self._info.threads:
            self._info = dataclasses.replace(self._info, threads=threads)
        return threads

    def _check_card(self, device: Device, cards: int) -> dict[str, float]:
        """Check the card before its first job, on all ranks at once; errors fail the job."""
        import torch

        from workloads.bench.card_check import EMULATED_PIECE_S, PIECE_S, check_card, check_link

        figures = check_card(device, piece_s=EMULATED_PIECE_S if self.config.emulated else PIECE_S)
        if cards > 1:
            figures["link_bytes_per_s"] = check_link(cards, device)
        if device.spec.can("host_cores"):
            return figures | {"threads": torch.get_num_threads()}
        with contextlib.suppress(Exception):  # a tool that is missing costs no job
            reading = device.telemetry().get(self.config.card.index)
            if reading is not None and reading.sm_clock_mhz is not None:
                figures["clock_mhz"] = reading.sm_clock_mhz
        return figures

    def _collective(
        self, attempt: Attempt, rank: int, rendezvous: Rendezvous | None, device: Device
    ) -> AbstractContextManager[base.Collective]:
        world_size = len(attempt.cards)
        if world_size == 1:
            return contextlib.nullcontext(_ONE_CARD)
        if rendezvous is None or world_size != self.config.world_size:
            raise base.BadConfiguration(
                f"attempt {attempt.attempt_id} has {world_size} cards; worker "
                f"{self.config.worker_id} was made for {self.config.world_size}"
                f"{'' if rendezvous else ' and got no rendezvous'}"
            )
        return joined(
            rendezvous=rendezvous,
            rank=rank,
            world_size=world_size,
            device=device,
            listener=self._listener if rank == 0 else None,
        )

    def _slot(
        self, attempt: Attempt, rank: int, collective: base.Collective, threads: int
    ) -> AbstractContextManager[Turn | None]:
        """Hold a CPU slot within the block, on a device that computes on host cores."""
        assert self.device is not None
        if not self.device.spec.can("host_cores"):
            return contextlib.nullcontext()
        self._enter(attempt.attempt_id, "queued")
        return cpu_slot(collective, rank, threads, self._cores)

    def _enter(self, attempt_id: str, phase: base.Phase) -> None:
        if phase == "measure":
            self._timed_from, self._timed_until = processor_reading(), None
        elif self._timed_from is not None and self._timed_until is None:
            self._timed_until = processor_reading(self._timed_from)
        # One assignment of a frozen value: safe to read from another thread.
        self._progress = Progress(
            worker_id=self.config.worker_id, attempt_id=attempt_id, phase=phase
        )

    def _load_resident(self, key: str, loader: Callable[[], Any]) -> Any:
        assert self.device is not None
        if self._resident.key == key:
            loaded, self._resident.was_used = self._resident.loaded, True
        else:
            if self._resident.key is not None:
                self._resident.drop()
                self._release_memory()
            loaded = self._resident.load(key, loader)
        self.device.seed(SEED)  # so that having loaded makes no difference to the job
        return loaded

    def _release_memory(self) -> None:
        gc.collect()
        if self.device is not None:
            self.device.release_memory()


_STATES = {
    None: State.SUCCEEDED,
    FailureClass.OUT_OF_MEMORY: State.OUT_OF_MEMORY,
    FailureClass.UNSUPPORTED: State.UNSUPPORTED,
}


def _warm_thread_pools() -> None:
    """Start torch's threads now: under a memory limit, failing to start one aborts."""
    import torch

    matrix = torch.ones(256, 256)
    for _ in range(2):
        matrix = torch.softmax(matrix @ matrix, dim=-1)


# ---------------------------------------------------------------- the attempt as a request


def request_of(attempt: Attempt) -> base.Request:
    """Convert an attempt to a request; a probe is one whole pass, for the longest prompts."""
    job = attempt.job
    if not isinstance(job.batch_size, int):
        message = f"attempt {attempt.attempt_id} has no batch size yet: {job.label}"
        raise base.BadConfiguration(message)
    measure = job.measure
    if attempt.purpose == "probe":
        measure = base.MeasureSettings(
            warmup=0, min_repeats=1, max_repeats=1, time_limit_s=measure.time_limit_s
        )
    spec = registry.find_workload(job.workload)
    parameters, settings = spec.split(dict(job.parameters), job.engine)
    owner = Owner.of_this_process() if attempt.purpose == "measure" else None
    taken = _taken(job)
    loaded = ", ".join(text for text, loads in taken.items() if loads)
    return base.Request(
        workload=job.workload,
        model=job.model,
        dataset=job.dataset,
        precision=job.precision,
        batch_size=job.batch_size,
        engine=job.engine,
        residency_key="|".join(filter(None, (job.residency_key, loaded))),
        parameters=parameters,
        settings=settings,
        measure=measure,
        probe=attempt.purpose == "probe",
        kept_as=f"{owner.run_id}-{job.job_id}" if owner is not None else "",
        saved_by=f"{owner.run_id}-{attempt.job_id}" if owner is not None else "",
        attempt=attempt.number,
        took=", ".join(taken),
    )


def _taken(job: Job) -> dict[str, bool]:
    """Identities of what a job consumes by name, and whether each is part of what it loads: a
    re-saved model is another one, and other data is read by the model that is there."""
    declared = {**registry.declared(job.workload, job.engine), **FIELDS}
    taken: dict[str, bool] = {}
    for _, name, thing in things([job], "consumes"):
        if saved := saving_of(*thing).identity:
            text = took(thing, saved)
            taken[text] = taken.get(text, False) or declared[name].loads
    return taken


# ---------------------------------------------------------------- the row of a result


def _verify_row(attempt: Attempt, rank: int, result: base.Result) -> None:
    """Make the row of a result once, so that a value that fits no column fails this job; in the
    driver it would end the run. Raises TypeError."""
    ended = RankOutcome(
        rank=rank, state=State.SUCCEEDED, started_at=0.0, ended_at=0.0, result=result
    )
    record = RecordRow(
        job=attempt.job,
        state=ended.state,
        reason="",
        final=True,
        attempt=attempt,
        outcome=Outcome.of_rank(attempt.attempt_id, ended),
    )
    try:
        for column, kind in RAW_TYPES.items():  # the statistics would not name the column
            odd = {type(raw) for raw in getattr(result, column)} - {kind}
            if odd:
                raise TypeError(
                    f"column {column!r} holds {odd.pop().__name__}, not {kind.__name__}"
                )
        for name in ("trace", "requests"):  # files beside the row
            if not isinstance(content := getattr(result, name), bytes | None):
                raise TypeError(f"{name} is {type(content).__name__}, not bytes")
        row_of(measurement_of(record, run="", invocation_id="", recorded_at=0.0))
    except Exception as error:
        text = f"workload {attempt.job.workload} gave back a Result that fits no row: {error}"
        raise TypeError(text) from error


# ---------------------------------------------------------------- the record of a failure

TAIL_LINES = 40
#: Messages of failed allocations besides MemoryError: torch's allocator, C++, oneDNN's code or
#: buffers (not its "primitive descriptor"), a thread's stack, a library's data. The last one is the
#: allocator's message cut to 15 bytes, which need no block.
_REFUSED = re.compile(
    r"can't allocate memory|cannot allocate memory|bad_alloc|bad allocation"
    r"|could not create a (primitive|memory object|memory)\s*$"
    r"|can't start new thread|failed to map segment from shared object"
    r"|^\[enforce fail a$",
    re.IGNORECASE,
)


def describe(
    error: BaseException,
    *,
    device: Device | None,
    memory_bytes: int | None,
    node_name: str,
    engine: str = "",
) -> Failure:
    """Classify and describe an exception, given any enforced limit, then clear its frames."""
    known = _known(error, device, memory_bytes, engine)
    failure_class = FailureClass.CRASH if isinstance(error, SystemExit) else classify(known)
    # Redact before cutting: half a key is not recognised.
    message = one_line(redact(str(known), os.environ), 2000) or redact(repr(error), os.environ)
    trace = redact("".join(traceback.format_exception(error)), os.environ)
    tail = trace.rstrip().splitlines()[-TAIL_LINES:]
    _let_go(error)
    log = ""
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/2")  # stderr, unless that is a terminal or a pipe
        log = f"{node_name}:{path}" if os.path.isfile(path) else ""
    return Failure(failure_class, message, tail="\n".join(tail), log=log)


def _known(
    error: BaseException, device: Device | None, memory_bytes: int | None, engine: str
) -> BaseException:
    if memory_bytes is not None:
        refused = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if isinstance(error, RuntimeError | ImportError):
            refused = _REFUSED.search(str(error)) is not None
        if refused:
            return base.OutOfMemory(
                f"the emulated card's {memory_bytes:,} bytes are exhausted: "
                f"{one_line(str(error), 2000) or type(error).__name__}"
            )
    if engine in ENGINES and (known := by_text(error, ENGINES[engine].errors, ValueError)):
        return known
    return device.classify(error) if device is not None else error


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
