"""Every column of the result tables: its unit, its meaning, and the numbers that it may hold.

``schema.py`` fails on a field of a record that is not described here. Percentiles are interpolated
linearly between samples. A number is not negative and at most 2^53 (exact in every program that
reads it) unless its entry says otherwise. The writer keeps what does not fit out of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Range(NamedTuple):
    """The numbers that a column may hold; of times, seconds since the epoch."""

    low: float = 0
    high: float = 2**53
    finite: bool = True  # otherwise NaN and infinities are allowed, too

    def admits(self, value: float) -> bool:
        """Return whether a number lies in the range."""
        if not self.finite and (value != value or value in (float("inf"), float("-inf"))):
            return True
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self == MOMENT:
            return "1970 to 2262"
        high = "" if self.high == 2**53 else f" to {self.high:,}"
        low = "any" if self.low == -(2**53) else f"{self.low:,}{high or ' or more'}"
        return low if self.finite else f"{low}; NaN, infinity"


FROM_0 = Range()
FROM_1 = Range(low=1)
COUNT = Range(low=1, high=1000)
SHARE = Range(low=0, high=1)
FINITE = Range(low=-(2**53))
ANY = Range(low=-(2**53), finite=False)
#: Range of times that every program for tables can hold, in nanoseconds too.
MOMENT = Range(low=0, high=9_214_646_400)


class Doc(NamedTuple):
    """An entry: unit, meaning, and the numbers that are allowed if it is one."""

    unit: str = ""
    meaning: str = ""
    allowed: Range = FROM_0


Docs = Mapping[str, Doc]
#: Meaning by name, with the numbers that are allowed where they are not ``FROM_0``.
_Entries = dict[str, str | tuple[str, Range]]
#: Units of columns whose names do not end in theirs, as ``load_s`` and ``weight_bytes`` do.
_UNITS = {
    **dict.fromkeys(("generated_tokens_per_s", "total_tokens_per_s"), "tokens/s"),
    **dict.fromkeys(("input_tokens", "output_tokens", "computed_tokens"), "tokens"),
    "items_per_s": "1/s",
    "energy_j": "J",
    "power_w": "W",
}

_COLUMNS: _Entries = {
    # which run, which job, which try
    "schema_version": "version of this format",
    "run": "name of the run",
    "invocation_id": "one `nightgrid run`; a run that was resumed has several",
    "job_id": "hash of what the job means; equal jobs have equal ids in every run",
    "attempt_id": "job id and attempt number; number 0 for a job that never ran",
    "attempt_number": ("which try at the job, from 1; 0 if it never ran", Range(high=999_999_999)),
    "final": "whether this is the job's terminal row of its invocation, or a repeat in its place",
    "purpose": "measure; probe: whether a batch size fits; trial: timed roughly, for best",
    "recorded_at": ("when the driver made the row", MOMENT),
    # what was asked
    "experiment": "name of the experiment in the grid file",
    "workload": "what was done, e.g. text-generation",
    "model": "model by name or path",
    "dataset": "dataset by name or path",
    "accelerator": "kind of card asked for, by its name in grids",
    "cards": ("how many cards the job has", Range(low=1, high=1_000_000)),
    "precision": "numbers that the weights are computed in, e.g. bf16, int8",
    "batch_size": ("prompts or samples a card that ran together; null: none ran", Range(1, 2**31)),
    "batch_size_requested": "batch size in the grid: a number, max or best",
    "engine": "library that runs the model",
    "isolation": "warm: workers keep models between jobs; process: each job its own",
    "parameters": "the workload's own settings; values are JSON",
    "measure": "how the job was to be timed",
    "replicate": ("number of this repetition of the cell in a process of its own, from 1", COUNT),
    "work_version": ("version of the work of these settings; a changed default raises it", COUNT),
    # what came of it
    "state": "how it ended: SUCCEEDED, OUT_OF_MEMORY, UNSUPPORTED, PRUNED, FAILED, …",
    "reason": "why it ended so, in a sentence",
    "failure_class": "kind of failure, which decides about retries",
    "failure_tail": "end of the traceback or of the error output",
    "log": "where the whole log lies, as host:path",
    "started_at": ("start of the attempt on its first rank", MOMENT),
    "ended_at": ("end of the attempt on its last rank", MOMENT),
    # where it ran
    "nodes": "names of the servers, each once, in card order",
    "card_indices": ("index of each card on its server", Range(high=1_000_000)),
    "device_name": "e.g. Gaudi2, NVIDIA H200",
    "driver_version": "version of the device's kernel driver",
    "emulated": "true: the card was a share of a CPU, and no number is one of a card",
    # with what
    "versions": "of the software in the worker; in the driver if nothing ran",
    "git_commit": "commit of Nightgrid's own working tree",
    "git_dirty": "whether that tree had uncommitted changes",
    "worker_pid": "process id of rank 0's worker",
    "threads": "OpenMP threads of rank 0's worker",
    "niceness": ("scheduling niceness of rank 0's worker", Range(low=-20, high=20)),
    "host_cores": ("physical cores of its host that rank 0's worker may use", FROM_1),
    "jobs_before": "attempts that the most used of the workers had run before this one",
    "model_was_resident": "whether every worker had the model loaded already",
    # the host's processors
    "processor_cores": "cores that the process kept busy in the timed part; the least of all ranks",
    "processor_wait_share": (
        "time in which threads that compute were runnable and not running, over the timed part; "
        "the most of all ranks; null: the kernel does not say"
    ),
    "stolen_share": ("share of wanted processor time that the hypervisor gave to others", SHARE),
    "host_load": "cores of the host that were busy in the timed part, with whatever process",
    "queued_s": "wait for a turn on processors, in no other figure; null: the device has none",
    "oversubscribed": "whether the job had more threads than its host has cores",
    # metrics
    "generated_tokens_per_s": "generated, up to and including end of sequence",
    "total_tokens_per_s": "real input and generated tokens, without padding",
    "items_per_s": "prompts, or training samples",
    "throughput": "what the workload declares; else generated tokens if any, else samples",
    "throughput_unit": "unit of throughput, e.g. tokens/s, samples/s",
    "throughput_low": ("lower end of the Student-t interval of the mean over repeats", FINITE),
    "throughput_high": "upper end of it; the level is measure.confidence",
    "relative_half_width": "half of that interval over the mean",
    "repeats": "complete timed repeats; 0: rates come from an incomplete one",
    "processes": (
        "processes that the interval spans: 1 in a row; more where a report joined replicates",
        Range(low=1, high=1000),
    ),
    "ttft_s": "time to first token, median over batches",
    "ttft_p95_s": (
        "time to first token, 95th percentile over batches; null: fewer than the 59 samples that "
        "a 95th percentile needs at 95 % confidence"
    ),
    "tpot_p50_s": "time per output token after the first, median over decoding steps",
    "tpot_p95_s": "the same, 95th percentile; null below 59 samples, as above",
    "tpot_p99_s": "the same, 99th percentile; null below 299 samples (459 at 99 %)",
    "latency_p50_s": "latency of a prompt in its batch, median over prompts",
    "latency_p95_s": "the same, 95th percentile; null below 59 prompts",
    "measure_s": "wall time of all timed batches on the slowest rank",
    "cpu_s": "CPU time of all timed batches, all ranks",
    "loss_first": ("loss of the first step, warm-up included, mean over ranks", ANY),
    "loss_last": ("loss of the last step, mean over ranks", ANY),
    "hump_ratio": (
        "where repeats are of two speeds, the faster over the slower; 1: of one; null: fewer "
        "than 10 repeats of equal size",
        FROM_1,
    ),
    "energy_j": "energy of all cards in the timed part, pauses included; null: not known",
    "power_w": "mean power of all cards together in the timed part",
    "drift": ("share by which a slow start slows the timed part; below 0: it got slower", FINITE),
    "energy_source": "counter: the cards' own; power: integrated from readings of power",
    # numbers that a rank reports once; of a gang the largest
    "stop_reason": "why timing stopped: confidence, max_repeats or time_limit",
    "load_s": "time to load the model; 0 if it was resident",
    "compile_s": "time to compile graphs that no cache held (details: compile_cache)",
    "warmup_s": "time of the untimed repeats and of what they met first",
    "warmup_steps": "untimed batches, optimizer steps and rehearsals of steps",
    "warmup_end": "complete: all shapes met, steps steady; limit: warmup_limit_s ran out",
    "shapes": "distinct shapes (rows x length) of the timed part",
    "shapes_unmet": "of these, those that were met first while the clock ran",
    "timed_parts": "how often timing began; all but the last count as warm-up",
    "timed_compilations": "graphs compiled in the timed part; null: nobody counts them",
    "timed_cpu_fallbacks": "operations of the timed part that the card left to the host",
    "weight_bytes": "weights on one card",
    "parameter_count": "parameters of the model",
    "trainable_parameter_count": "of these and of adapters, those that were trained",
    "train_flops_per_token": "operations of the linear layers, forward and backward, per token",
    "tokenization_s": "time to tokenize all prompts or training samples, before timing",
    "detokenization_s": "time to turn all generated ids of a repeat into text, after timing",
    "baseline_host_memory_bytes": "resident in the worker after imports, before a model",
    "peak_host_memory_bytes": "largest resident memory of a worker",
    "peak_device_memory_bytes": "largest memory allocated on a card",
    "random_weights": "true: never trained, wholly or in part; only its speed means something",
    "synthetic_data": "true: the dataset was made up by a program",
    "precision_detail": "what the precision meant on this device and in this library",
    "workload_metrics": ("figures by name of all ranks, reported or derived from samples", ANY),
    "details": "anything else that the workload found worth keeping",
    # raw
    "samples": "every timed batch and warm-up batch, in order",
    "items": "every prompt of the last complete repeat",
    "image": "the first image that the job made, as PNG, at most 512 pixels wide and high",
}

_NESTED: dict[str, _Entries] = {
    "MeasureSettings": {
        "warmup": "untimed repeats, at least",
        "min_repeats": "fewest timed repeats",
        "max_repeats": "most timed repeats",
        "confidence": ("level of the interval", Range(low=0.01, high=0.999_999_999)),
        "relative_half_width": "timing stops when the interval is this tight",
        "time_limit_s": "limit of the timed part",
        "warmup_limit_s": "limit of warm-up",
        "least_s": "fewest seconds of the timed part",
        "repeat_flagged": "most further measurements of a flagged row in its run",
    },
    "Sample": {
        "repeat": "number of the repeat, from 0; warm-up is numbered too",
        "batch": "number of the batch in the repeat, from 0",
        "warmup": "whether it was not timed for the result",
        "complete": "whether its repeat was finished",
        "wall_s": "wall time of the batch",
        "cpu_s": "CPU time of the process, all threads",
        "items": "prompts or training samples",
        "input_tokens": "real ones, without padding",
        "output_tokens": "generated, up to and including end of sequence",
        "computed_tokens": "positions that the device worked on, padding included",
        "ttft_s": "time to first token of the batch",
        "step_s": "time of each decoding step after the first",
        "loss": ("training loss; NaN where it was", ANY),
        "data_s": "of a training step: waiting for the batch",
        "forward_s": "of a training step: the forward pass",
        "backward_s": "of a training step: the backward pass",
        "optimizer_s": "of a training step: the optimizer's update",
        "communication_s": "of a training step: between cards, as far as it shows",
        "encoder_s": "of a generated batch: the encoder's pass; null without an encoder",
        "text_encoding_s": "of a batch of images: encoding the prompts",
        "denoising_s": "of a batch of images: all denoising steps",
        "decoding_s": "of a batch of images: from latents to pixels",
        "conversion_s": "of a batch of images: copying to the host and conversion",
    },
    "Item": {
        "index": "position in the dataset",
        "input_tokens": "length of the prompt",
        "output_tokens": "length of the answer",
        "latency_s": "from the start of the batch to this prompt's last token",
        "ttft_s": "time to first token",
        "output_text": "the answer itself, kept for the first few prompts",
        "output_ids": "its tokens as they were counted, kept with the text",
    },
    "Prediction": {
        "job_id": "job of the cell, its first replicate",
        "label": "label of the cell among those of its grid",
        "workload": "its workload",
        "model": "its model",
        "dataset": "its dataset",
        "accelerator": "its kind of card",
        "cards": "how many cards it has",
        "precision": "its precision",
        "batch_size": "its batch size per card, as requested",
        "engine": "its engine",
        "figure": "what is predicted, such as throughput, in the unit of that column of the rows",
        "value": "median of what a measurement is expected to give",
        "low": "a measurement is expected above it with probability 0.975",
        "high": "a measurement is expected below it with probability 0.975",
        "log_deviation": "standard deviation of the natural log of a measurement",
        "runs": "probability that the cell can be measured at all",
        "measured": "cells of the same run that it rests on",
        "earlier": "cells of other runs that it rests on",
        "basis": "what it rests on, in words",
    },
}

#: Column of the nested records beside their own fields: the rank that measured.
RANK = Doc("", "rank that measured it", Range(high=1_000_000))


def _documented(entries: _Entries) -> Docs:
    docs = {}
    for name, entry in entries.items():
        meaning, allowed = (entry, FROM_0) if isinstance(entry, str) else entry
        ending = "s" if name.endswith("_s") else "bytes" if name.endswith("_bytes") else ""
        docs[name] = Doc(_UNITS.get(name, ending), meaning, allowed)
    return docs


COLUMN_DOCS: Docs = _documented(_COLUMNS)
NESTED_DOCS: Mapping[str, Docs] = {name: _documented(docs) for name, docs in _NESTED.items()}
