"""A process's share of the processors, worked out from two readings."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.readings import (
    SHORTEST_OF_HOST_S,
    HostTime,
    ProcessorReading,
    ThreadTime,
    use_between,
)

SECONDS = st.floats(0.0, 1e4)


def reading(
    at: float, threads: dict[int, tuple[float, float]] | None, host: tuple[float, float] | None
) -> ProcessorReading:
    """A reading: seconds that each thread ran and waited, and that the host was busy and stolen."""
    return ProcessorReading(
        at=at,
        ran_s=sum(ran for ran, _ in threads.values()) if threads else at / 2,
        threads=threads
        and {number: ThreadTime(ran_s=r, waited_s=w) for number, (r, w) in threads.items()},
        host=host and HostTime(busy_s=host[0], stolen_s=host[1]),
    )


def test_threads_that_compute_count_and_samplers_do_not() -> None:
    before = reading(10.0, {1: (100.0, 5.0), 2: (50.0, 1.0), 9: (1.0, 1.0)}, (1000.0, 10.0))
    after = reading(
        20.0, {1: (108.0, 6.0), 2: (54.0, 3.0), 3: (2.0, 0.5), 9: (1.1, 7.0)}, (1018.0, 12.0)
    )
    use = use_between(before, after)
    assert use is not None
    assert use.cores == pytest.approx(1.41)
    assert use.wait_share == pytest.approx((1.0 + 2.0 + 0.5) / 10)
    assert use.stolen_share == pytest.approx(2 / 20)
    assert use.host_load == pytest.approx(1.8)


def test_what_the_kernel_does_not_say_is_not_known() -> None:
    use = use_between(reading(1.0, None, None), reading(3.0, None, None))
    assert use is not None and use.cores == pytest.approx(0.5)
    assert (use.wait_share, use.stolen_share, use.host_load) == (None, None, None)
    assert use_between(reading(1.0, None, None), reading(1.0, None, None)) is None


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(SECONDS, SECONDS)),
    st.dictionaries(st.integers(0, 5), st.tuples(SECONDS, SECONDS)),
    st.tuples(SECONDS, SECONDS),
    st.tuples(SECONDS, SECONDS),
    st.floats(1e-3, 1e4),
)
def test_figures_are_never_out_of_range(
    threads: dict[int, tuple[float, float]],
    later: dict[int, tuple[float, float]],
    host: tuple[float, float],
    host_later: tuple[float, float],
    wall_s: float,
) -> None:
    use = use_between(reading(0.0, threads, host), reading(wall_s, later, host_later))
    assert use is not None and use.cores >= 0
    assert (use.host_load is None) == (wall_s < SHORTEST_OF_HOST_S)
    assert use.wait_share is None or use.wait_share >= 0
    assert use.stolen_share is None or 0 <= use.stolen_share <= 1
    assert use.host_load is None or use.host_load >= 0


def test_the_host_s_load_is_of_the_time_between_its_own_counts() -> None:
    before = reading(10.0, None, (100.0, 1.0))
    after = reading(11.0, None, (102.2, 1.0))
    assert before.host is not None and after.host is not None
    earlier = dataclasses.replace(before, host=dataclasses.replace(before.host, at=9.9))
    use = use_between(earlier, after)
    assert use is not None and use.host_load == pytest.approx(2.0)
    use = use_between(before, after)
    assert use is not None and use.host_load == pytest.approx(2.2)
