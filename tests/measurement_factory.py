"""Rows of a believable night, made without running anything.

The figures follow a simple model of decoding (a memory-bound step time that grows slowly with the
batch, noise of about one per cent), so that tables and curves look as real ones do: throughput
saturates, wide precisions run out of memory first, narrow ones pay for unpacking. They are test
data and nothing else; every row says that it is emulated, random and synthetic unless asked.
"""

from __future__ import annotations

import io
import random
from dataclasses import replace

import core_cases
from measurements import of_job
from rich.console import Console

from orchestrator.analysis.samples import derived_figures, metrics_of
from orchestrator.analysis.summary import Summary
from orchestrator.core.job import MAX, Accelerator, Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.report.text import print_summary
from workloads import registry
from workloads.base import Item

START = 1_770_000_000.0
GIB = 2**30
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
SLOWDOWN = {"fp32": 1.0, "fp16": 1.03, "bf16": 1.0, "fp8": 1.05, "int8": 1.25, "int4": 1.45}
PARAMETERS = {
    "chatglm3-6b": 6.24e9,
    "tiny-chatglm3": 2.1e7,
    "smollm2-135m-instruct": 1.35e8,
    "google-bert/bert-base-uncased": 109_514_298,
    "google-t5/t5-3b": 2_851_598_336,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": 1_066_235_307,
}
DEVICES = {
    Accelerator.HPU: ("Gaudi2", 96 * GIB, 2.46e12),
    Accelerator.GPU: ("NVIDIA H200", 141 * GIB, 4.8e12),
    Accelerator.CPU: ("AMD EPYC 9B14", 64 * GIB, 0.2e12),
}
HOSTILE = (
    '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'
    " & \"quoted\" 'single' `tick` [red]markup[/red] \x1b[31mansi\x1b[0m \u2028 \x00 | pipe =1+1"
)
TRACE = (
    "Traceback (most recent call last):\n"
    '  File "workloads/text_generation.py", line 214, in run\n'
    "    output = generate(model, batch)\n"
    "RuntimeError: synStatus=26 [Generic failure] Device acquire failed.\n"
)
FAILURE_CLASSES = {
    State.OUT_OF_MEMORY: "out_of_memory",
    State.UNSUPPORTED: "unsupported",
    State.FAILED: "acquire",
    State.TIMED_OUT: "hang",
    State.LOST: "node_lost",
}


class Night:
    """Lays jobs onto cards one after another and returns their rows in the order of writing."""

    def __init__(self, *, seed: int = 7, emulated: bool = True, run: str = "smoke") -> None:
        self.random = random.Random(seed)
        self.emulated = emulated
        self.run = run
        self.rows: list[Measurement] = []
        self.free: dict[tuple[str, int], float] = {}

    def add(
        self,
        job: Job,
        state: State = State.SUCCEEDED,
        *,
        nodes: int = 2,
        items: int = 12,
        final: bool = True,
        reason: str = "",
        attempt: int = 1,
        **changes: object,
    ) -> Measurement:
        ran = state not in (State.UNSUPPORTED, State.PRUNED, State.NOT_STARTED)
        row = self._blank(job, state, reason, final, attempt)
        if ran:
            row = self._placed(row, job, state, nodes)
        if state is State.SUCCEEDED:
            row = self._measured(row, job, items)
        row = replace(row, **changes)
        self.rows.append(row)
        return row

    def _blank(self, job: Job, state: State, reason: str, final: bool, attempt: int) -> Measurement:
        ran = state not in (State.UNSUPPORTED, State.PRUNED, State.NOT_STARTED)
        number = attempt if ran else 0
        return Measurement(
            **of_job(job),
            schema_version=1,
            run=self.run,
            invocation_id="night-1",
            attempt_id=f"{job.job_id}-{number}",
            attempt_number=number,
            final=final,
            purpose="measure",
            batch_size=None if job.batch_size == MAX else int(job.batch_size),
            state=state,
            reason=reason or _reason(job, state),
            failure_class=FAILURE_CLASSES.get(state),
            failure_tail=TRACE if state is State.FAILED else None,
            log=f"hpu-1:{self.run}/logs/{job.job_id}-{number}.log" if ran else None,
            emulated=self.emulated,
        )

    def _placed(self, row: Measurement, job: Job, state: State, nodes: int) -> Measurement:
        prefix = str(job.accelerator).lower()
        for node in range(1, nodes + 1):
            for index in range(8):
                self.free.setdefault((f"{prefix}-{node}", index), START)
        mine = [key for key in self.free if key[0].startswith(prefix + "-")]
        first = min(mine, key=lambda key: (self.free[key], key))
        start_card = first[1] // job.cards * job.cards
        held = [(first[0], start_card + i) for i in range(job.cards)]
        start = max(self.free[key] for key in held) + self.random.uniform(0.05, 0.6)
        length = {State.TIMED_OUT: 300.0, State.LOST: 41.0}.get(state, self.random.uniform(18, 95))
        for key in held:
            self.free[key] = start + length
        device = "AMD EPYC 9B14" if self.emulated else DEVICES[job.accelerator][0]
        return replace(
            row,
            started_at=start,
            ended_at=start + length,
            nodes=tuple(node for node, _ in held) if job.cards == 1 else (first[0],),
            card_indices=tuple(index for _, index in held),
            device_name=device,
            driver_version="" if self.emulated else "1.24.0",
            versions={
                "nightgrid": "0.1.0",
                "python": "3.11.2",
                "torch": "2.13.0+cpu",
                "transformers": "5.23.0",
                "ray": "2.60.0",
            },
            git_commit="f19a1bf0c0ffee00112233445566778899aabbcc",
            git_dirty=False,
            worker_pid=4000 + start_card,
            threads=1,
            niceness=0,
            jobs_before=self.random.randrange(6),
            model_was_resident=self.random.random() < 0.5,
        )

    def _measured(self, row: Measurement, job: Job, items: int) -> Measurement:
        """The row with samples, prompts and figures that agree: nothing here could be a lie."""
        batch = row.batch_size or 48
        said = str(dict(job.parameters).get("output_tokens"))
        output = int(said) if said.isdecimal() else 128  # a load may name a distribution
        step = step_time(job, batch) * self.random.gauss(1, 0.012)
        weights = int(PARAMETERS.get(job.model, 1e9) * BYTES.get(job.precision, 2.0))
        first = step * min(9, output / 2)
        prompts = [self._item(n, step, first, output) for n in range(batch * job.cards)]
        prompts = prompts if items else []
        texts = [item.output_tokens for item in prompts] or [output] * batch * job.cards
        tokens_read = sum(item.input_tokens for item in prompts) or 90 * len(texts)
        wall = first + step * (max(texts) - 1)
        # A processor that is as fast as a card has as many cores as that takes.
        work_s = 2 * PARAMETERS.get(job.model, 1e9) * sum(texts) / 2e11
        walls = [wall * self.random.gauss(1, 0.01) for _ in range(3)]
        samples = tuple(
            core_cases.a_sample(
                repeat=repeat,
                warmup=repeat == 0,
                wall_s=wall_s,
                cpu_s=max(wall_s, work_s),
                items=len(texts),
                input_tokens=tokens_read,
                output_tokens=sum(texts),
                computed_tokens=len(texts) * (400 + output),
                ttft_s=first * wall_s / wall,
            )
            # The prompts are those of the last repeat, which the others scatter around.
            for repeat, wall_s in enumerate((wall, *walls, wall))
        )
        ranked = tuple((0, sample) for sample in samples)
        kept = tuple((0, item) for item in prompts)
        return replace(
            row,
            batch_size=batch,
            metrics=replace(
                metrics_of(ranked, kept),
                tpot_p50_s=step,
                tpot_p95_s=step * 1.2,
                tpot_p99_s=step * 1.5,
            ),
            stop_reason="confidence",
            load_s=self.random.uniform(2, 9),
            compile_s=0.0,
            warmup_s=wall,
            weight_bytes=weights,
            parameter_count=int(PARAMETERS.get(job.model, 1e9)),
            baseline_host_memory_bytes=GIB // 2,
            peak_host_memory_bytes=GIB // 2 + weights + batch * 60 * 2**20,
            peak_device_memory_bytes=None if self.emulated else weights + batch * 600 * 2**20,
            random_weights=self.emulated,
            synthetic_data=job.dataset.endswith("synthetic"),
            precision_detail=f"{job.precision} weights",
            workload_metrics=derived_figures(registry.metrics_of(job.workload), ranked, kept),
            samples=ranked,
            items=kept,
        )

    def _item(self, index: int, step: float, first: float, output: int) -> Item:
        input_tokens = int(min(400, max(8, self.random.lognormvariate(4.2, 0.6))))
        generated = (
            output if self.random.random() < 0.4 else self.random.randint(min(8, output), output)
        )
        own_first = first * (0.5 + input_tokens / 800)
        return Item(
            index=index,
            input_tokens=input_tokens,
            output_tokens=generated,
            latency_s=own_first + step * (generated - 1),
            ttft_s=own_first,
            output_text="这款连衣裙采用了修身的版型设计，简约大方。" if index < 3 else None,
        )


def printed(summary: Summary, width: int = 120, *, colour: bool = False, **options: object) -> str:
    file = io.StringIO()
    system = "standard" if colour else None
    console = Console(file=file, width=width, force_terminal=colour, color_system=system)
    print_summary(summary, console, **options)
    return file.getvalue()


def with_interval(
    row: Measurement, value: float, half: float | None, **metrics: float
) -> Measurement:
    """The row with this throughput and half width of its interval, and without the samples that
    would give another."""
    changed = replace(
        row.metrics,
        throughput=value,
        generated_tokens_per_s=value,
        total_tokens_per_s=1.7 * value,
        throughput_low=None if half is None else value - half,
        throughput_high=None if half is None else value + half,
        relative_half_width=None if half is None else half / value if value else None,
        **metrics,
    )
    return replace(row, metrics=changed, samples=(), items=())


def step_time(job: Job, batch: int) -> float:
    """Seconds of one decoding step: read the weights once, and pay a little for each sequence."""
    bandwidth = DEVICES[job.accelerator][2]
    read = PARAMETERS.get(job.model, 1e9) * BYTES.get(job.precision, 2.0) / bandwidth
    return (read + 0.0009 + 0.00012 * batch) * SLOWDOWN.get(job.precision, 1.3)


def fits(job: Job, batch: int) -> bool:
    """Return whether the model and its cache fit into the card."""
    need = PARAMETERS.get(job.model, 1e9) * BYTES.get(job.precision, 2.0) + batch * 1.1 * GIB
    return need < DEVICES[job.accelerator][1] * 0.95


def a_job(**changes: object) -> Job:
    known: dict[str, object] = {
        "experiment": "precision",
        "model": "chatglm3-6b",
        "precision": "bf16",
        "batch_size": 8,
        "parameters": (("attention", "sdpa"), ("output_tokens", 128)),
    }
    return core_cases.a_job(**{**known, **changes})


def precision_grid(
    night: Night,
    *,
    model: str = "chatglm3-6b",
    accelerator: Accelerator = Accelerator.HPU,
    cards: int = 1,
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128),
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16", "int8", "int4"),
    unsupported: tuple[str, ...] = ("int4",),
    **options: object,
) -> None:
    """Every cell of one precision x batch-size table, as a night would end it."""
    changes = {k: options.pop(k) for k in ("dataset", "parameters", "engine") if k in options}
    for precision in precisions:
        full = False
        for size in sizes:
            job = a_job(
                model=model,
                accelerator=accelerator,
                cards=cards,
                precision=precision,
                batch_size=size,
                **changes,
            )
            state = State.SUCCEEDED
            if precision in unsupported:
                state = State.UNSUPPORTED
            elif full:
                state = State.PRUNED
            elif not fits(job, size):
                state, full = State.OUT_OF_MEMORY, True
            night.add(job, state, **options)


def every_state(*, emulated: bool = True, items: int = 12) -> list[Measurement]:
    """A night in which every terminal state occurs, with retries, a gang, probes and hostility."""
    night = Night(emulated=emulated)
    precision_grid(night, items=items)
    precision_grid(
        night,
        model="smollm2-135m-instruct",
        accelerator=Accelerator.GPU,
        unsupported=(),
        items=items,
    )
    precision_grid(night, cards=4, sizes=(8, 32, 128), precisions=("bf16",), items=items)
    flaky = a_job(precision="fp8", batch_size=4)
    night.add(flaky, State.LOST, final=False)
    night.add(flaky, State.SUCCEEDED, attempt=2, items=items)
    for batch, state in ((16, State.FAILED), (32, State.FAILED), (64, State.TIMED_OUT)):
        night.add(a_job(precision="fp8", batch_size=batch), state)
    night.add(a_job(precision="fp8", batch_size=128), State.LOST)
    night.add(a_job(precision="fp8", batch_size=256), State.NOT_STARTED)
    largest = a_job(batch_size=MAX)
    for size in (1, 32, 64):
        night.add(largest, State.SUCCEEDED, final=False, purpose="probe", batch_size=size, items=0)
    night.add(largest, items=items)
    night.add(
        a_job(model='<b>"evil"</b>', dataset="</script>", experiment="<i>x</i>"),
        State.FAILED,
        reason=HOSTILE,
        failure_tail=HOSTILE * 3,
        log=f"host:{HOSTILE}",
    )
    outputs = night.add(a_job(precision="fp8", batch_size=1), items=items)
    poisoned = tuple((rank, replace(item, output_text=HOSTILE)) for rank, item in outputs.items)
    night.rows[-1] = replace(outputs, items=poisoned)
    return night.rows


def large_run(rows: int = 10_000, *, items: int = 10) -> list[Measurement]:
    """A run of exactly ``rows`` jobs over many output lengths, on eight nodes of two kinds; the
    first 600 are repeated with other numbers of prompts."""
    night = Night(run="overnight")
    for length in range(16, 112, 8):
        if len(night.rows) >= rows:
            break
        for accelerator in (Accelerator.HPU, Accelerator.GPU):
            precision_grid(
                night,
                accelerator=accelerator,
                sizes=(1, 2, 4, 8, 16),
                nodes=4,
                items=items,
                parameters=(("attention", "sdpa"), ("output_tokens", length), ("prompts", 1)),
            )
    copies = [
        replace(
            row,
            job_id=f"{number:04x}{row.job_id[4:]}",
            parameters={**row.parameters, "prompts": 1 + number},
        )
        for number in range(1, -(-rows // len(night.rows)))
        for row in night.rows
    ]
    return [*night.rows, *copies][:rows]


def _reason(job: Job, state: State) -> str:
    return {
        State.SUCCEEDED: "",
        State.OUT_OF_MEMORY: f"out of memory at batch size {job.batch_size}",
        State.UNSUPPORTED: f"{job.precision} has no kernels on {job.accelerator.device}",
        State.PRUNED: f"batch size {job.batch_size} is larger than one that ran out of memory",
        State.FAILED: "device acquire failed: synStatus=26",
        State.TIMED_OUT: "no progress in phase measure for 300 s",
        State.LOST: "node hpu-1 left the cluster",
        State.NOT_STARTED: "the deadline of the run was reached",
    }[state]
