"""The figures that waiting jobs keep agree with the jobs that wait, whatever was done before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import job

from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Card
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.queues import PendingJobs
from orchestrator.scheduler.state import JobState

RECORDS = st.tuples(
    st.sampled_from([1, 1, 2, 8]),
    st.sampled_from(["warm", "process"]),
    st.booleans(),
    st.integers(1, 100),
    st.integers(0, 20),
    st.booleans(),
)
AVOIDED = Card(node_id="n1", index=0, accelerator=Accelerator.HPU)


def record(order: int, kind: tuple) -> JobState:
    """A job that waits; its times are whole seconds, so that sums are exact."""
    width, isolation, first, run_s, load_s, *_ = kind
    wanted = job(f"job {order}", cards=width, isolation=isolation)
    return JobState(
        job=wanted,
        job_id=wanted.job_id,
        order=order,
        estimate=Estimate(load_s=float(load_s), run_s=float(run_s)),
        first=first,
    )


def check(pending: PendingJobs, waiting: list[JobState]) -> None:
    """Every sum is that of the jobs that wait."""
    firsts = [each for each in waiting if each.first]
    assert pending.card_seconds == sum(each.width * each.duration for each in waiting)
    assert pending.firsts == len(firsts)
    assert pending.firsts_s == sum(each.width * each.duration for each in firsts)
    assert sorted(pending.widths()) == sorted({e.width for e in waiting if e.width > 1})
    singles = [(each.first, each.duration) for each in waiting if each.width == 1]
    work_s = sum(bucket.queue.work_s for bucket in pending.buckets.values())
    assert work_s == sum(duration for _, duration in singles)
    for width in pending.widths():
        gangs = [(each.first, each.duration) for each in waiting if each.width == width]
        if not any(each.avoided for each in waiting):
            assert pending.is_turn_of(width) == (max(gangs) >= max(singles, default=(False, 0.0)))


@given(st.lists(RECORDS, max_size=8), st.lists(RECORDS, max_size=8), st.data())
def test_sums_are_those_of_what_waits(
    loaded: list[tuple], pushed: list[tuple], data: st.DataObject
) -> None:
    pending = PendingJobs()
    waiting = [record(order, kind) for order, kind in enumerate(loaded)]
    for each in waiting:
        pending.push(each)
    check(pending, waiting)
    coming = [record(100 + order, kind) for order, kind in enumerate(pushed)]
    while coming or waiting:
        act = data.draw(
            st.sampled_from(["push"] * bool(coming) + ["take", "reckon"] * bool(waiting))
        )
        if act == "push":
            waiting.append(coming.pop())
            if waiting[-1].width > 1 and pushed[waiting[-1].order - 100][-1]:
                waiting[-1].avoided = frozenset({AVOIDED})
            pending.push(waiting[-1])
        else:
            chosen = data.draw(st.sampled_from(waiting))
            if act == "reckon":
                seconds = float(data.draw(st.integers(1, 100)))
                other = Estimate(load_s=chosen.estimate.load_s, run_s=seconds)
                pending.reestimate(chosen, other)
            else:
                waiting.remove(chosen)
                assert pending.take(chosen) is chosen
        check(pending, waiting)
