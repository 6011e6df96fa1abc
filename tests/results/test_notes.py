"""The note of an attempt stands for the row that the attempt has if its driver dies."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from measurements import job, note, recorded

from orchestrator.core.errors import SchemaMismatch, StoreError
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, RankOutcome
from orchestrator.core.topology import Card, Node
from orchestrator.results.derive import Provenance, measurement_of
from orchestrator.results.notes import Notes, row_of
from orchestrator.results.schema import SCHEMA_VERSION
from workloads.base import MeasureSettings

NODES = tuple(
    Node(
        node_id=node_id,
        name=f"gaudi-{node_id}",
        accelerator=Accelerator.HPU,
        card_indices=(0, 1),
        device_name="Gaudi2",
        emulated=node_id == "b",
    )
    for node_id in "ab"
)
JOBS = [
    job(),
    job(parameters=()),
    job(
        model='a "quoted" näme\udcff\n',
        accelerator=Accelerator.GPU,
        isolation="process",
        parameters=(("float", 1e-7), ("int", 3), ("none", None), ("text", "größer"), ("yes", True)),
        measure=MeasureSettings(warmup=0, relative_half_width=0.1, time_limit_s=1 / 3),
    ),
]


def attempt_at(one: Job, *node_ids: str) -> Attempt:
    """A probe at a job, one card of each node."""
    return Attempt(
        attempt_id=f"{one.job_id}-7",
        job_id=one.job_id,
        number=7,
        job=replace(one, batch_size=64),
        cards=tuple(Card(node_id=each, index=1, accelerator=one.accelerator) for each in node_ids),
        purpose="probe",
    )


@pytest.mark.parametrize("one", JOBS)
def test_an_attempt_reads_back_as_it_was_written(one: Job) -> None:
    """Every value has its type again; the id of its job is the same."""
    written = attempt_at(one, "a", "b")
    read = Attempt.from_json(written.to_json())
    assert read == written and repr(read) == repr(written)
    assert read.job.job_id == written.job.job_id
    changed = replace(written, number=8)
    assert Attempt.from_json(changed.to_json()) == changed


@pytest.mark.parametrize("one", JOBS)
@pytest.mark.parametrize("node_ids", ["a", "b", "ab", "gone"])
def test_a_note_is_the_row_that_the_driver_would_have_made(one: Job, node_ids: str) -> None:
    """On one card, on a gang of two nodes, and on nodes that nobody knows."""
    begins = attempt_at(one, *node_ids)
    origin = Provenance(versions={"python": "3.12", "ray": "2.60"}, git_commit="c0ffee")
    noted = Notes(run="night", invocation_id="i1", provenance=origin).of(begins, 1e9 + 0.1, NODES)
    row = row_of(noted.text)
    failure = Failure(failure_class=FailureClass.NODE_LOST, message=row.reason)
    rank = RankOutcome(
        rank=0, state=State.LOST, started_at=1e9 + 0.1, ended_at=1e9 + 0.1, failure=failure
    )
    record = recorded(begins, rank, state=State.LOST, reason=row.reason)
    expected = measurement_of(
        record,
        run="night",
        invocation_id="i1",
        recorded_at=1e9 + 0.1,
        provenance=origin,
        nodes=NODES,
    )
    assert row == replace(expected, model=row.model)
    assert noted.attempt_id == row.attempt_id and "died while it ran" in row.reason


def test_a_note_of_what_was_given_ahead_says_of_no_time_that_it_ran() -> None:
    """It may never have begun."""
    begins = attempt_at(JOBS[0], "a")
    row = row_of(Notes(run="night", invocation_id="i1").of(begins, 1e9, NODES, ahead=True).text)
    assert row.state is State.LOST and row.started_at is None and row.failure_class is None
    assert "not known to have begun" in row.reason


def test_a_note_of_a_newer_version_is_refused() -> None:
    """As its row would be."""
    text = json.loads(note().text)
    text["driver"]["schema_version"] = SCHEMA_VERSION + 1
    with pytest.raises(SchemaMismatch, match="a note has schema version"):
        row_of(json.dumps(text))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("attempt",), None),
        (("attempt", "job", "accelerator"), "TPU"),
        (("attempt", "job", "cards"), "one"),
        (("attempt", "job", "another"), 1),
        (("attempt", "cards"), [["a", 1]]),
        (("driver", "versions"), 1),
        (("nodes",), 1),
        (("at",), "now"),
    ],
)
def test_what_is_no_note_is_no_row(path: tuple[str, ...], value: object) -> None:
    """JSON with other values in it is an error of the store's, whatever they are."""
    text = json.loads(note().text)
    inner = text
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(StoreError):
        row_of(json.dumps(text))
