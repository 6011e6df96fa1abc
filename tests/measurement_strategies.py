"""Any measurement whose numbers are in the ranges of their columns, for laws about tables."""

from __future__ import annotations

from hypothesis import strategies as st

from orchestrator.core.job import Accelerator, State
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store.schema import SCHEMA_VERSION
from workloads.base import Item, MeasureSettings, Sample

NAMES = st.text(max_size=12)
INTEGERS = st.integers(0, 2**53)
FLOATS = st.floats(0, 2**53)
LOSSES = st.floats(-(2**53), 2**53) | st.sampled_from([float("inf"), float("-inf")])
TIMES = st.integers(0, 4_000_000_000_000_000).map(lambda us: us / 1_000_000)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES
TEXTS = st.dictionaries(NAMES, NAMES, max_size=3)

samples = st.builds(
    Sample,
    repeat=INTEGERS,
    batch=INTEGERS,
    warmup=st.booleans(),
    complete=st.booleans(),
    wall_s=FLOATS,
    cpu_s=FLOATS,
    items=INTEGERS,
    input_tokens=INTEGERS,
    output_tokens=INTEGERS,
    computed_tokens=INTEGERS,
    ttft_s=st.none() | FLOATS,
    step_s=st.lists(FLOATS, max_size=3).map(tuple),
    loss=st.none() | LOSSES,
)
items = st.builds(
    Item,
    index=INTEGERS,
    input_tokens=INTEGERS,
    output_tokens=INTEGERS,
    latency_s=FLOATS,
    ttft_s=st.none() | FLOATS,
    output_text=st.none() | NAMES,
    output_ids=st.none() | st.lists(INTEGERS, max_size=3).map(tuple),
)
metrics = st.builds(
    Metrics,
    throughput=st.none() | FLOATS,
    throughput_unit=NAMES,
    repeats=INTEGERS,
    loss_last=st.none() | LOSSES,
    energy_j=st.none() | FLOATS,
    energy_source=st.sampled_from([None, "counter", "power"]),
)
measurements = st.builds(
    Measurement,
    schema_version=st.just(SCHEMA_VERSION),
    run=NAMES,
    invocation_id=NAMES,
    job_id=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    attempt_id=NAMES,
    attempt_number=st.integers(0, 999_999_999),
    final=st.booleans(),
    purpose=st.sampled_from(["measure", "probe"]),
    recorded_at=st.none() | TIMES,
    experiment=NAMES,
    workload=NAMES,
    model=NAMES,
    dataset=NAMES,
    accelerator=st.sampled_from(list(Accelerator)),
    cards=st.integers(1, 1_000_000),
    precision=NAMES,
    batch_size=st.none() | st.integers(1, 2**31),
    batch_size_requested=NAMES,
    engine=NAMES,
    isolation=NAMES,
    parameters=st.dictionaries(NAMES, SCALARS, max_size=3),
    measure=st.builds(MeasureSettings, warmup=INTEGERS, confidence=st.floats(0.5, 0.999)),
    state=st.sampled_from(State),
    reason=NAMES,
    failure_tail=st.none() | NAMES,
    started_at=st.none() | TIMES,
    ended_at=st.none() | TIMES,
    nodes=st.lists(NAMES, max_size=2).map(tuple),
    card_indices=st.lists(st.integers(0, 1_000_000), max_size=2).map(tuple),
    emulated=st.booleans(),
    versions=TEXTS,
    git_dirty=st.none() | st.booleans(),
    metrics=metrics,
    weight_bytes=st.none() | INTEGERS,
    synthetic_data=st.none() | st.booleans(),
    workload_metrics=st.dictionaries(NAMES, LOSSES, max_size=3),
    details=TEXTS,
    samples=st.lists(st.tuples(st.integers(0, 7), samples), max_size=3).map(tuple),
    items=st.lists(st.tuples(st.integers(0, 7), items), max_size=3).map(tuple),
)
