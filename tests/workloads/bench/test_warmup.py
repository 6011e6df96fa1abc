"""Warm-up ends when every shape was met and steps are steady, on clocks that work alone moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_measure import Bench, of_ranks

from workloads.base import MeasureSettings, Result, whole_sample
from workloads.bench.collective import OneCard
from workloads.bench.measure import Measured, Observation, measure
from workloads.bench.warmup import WarmupPlan, rehearse, repeated_if_compiled, to_rehearse
from workloads.devices.base import Compilations, torch_compilations


class Compiling(Bench):
    """Batches of given shapes; the first meeting of each costs what a compilation does."""

    def __init__(self, shapes: list[str], work_s: float, compile_s: float) -> None:
        def met(repeat: int, batch: int) -> float:
            first = shapes[batch] not in self.known
            self.known.add(shapes[batch])
            return work_s + compile_s * first

        super().__init__(met)
        self.shapes = shapes
        self.known: set[str] = set()
        self.context.device.compilations = lambda: Compilations(graphs=len(self.known))

    def run_batch(self, repeat: int, batch: int) -> Callable[[], Observation]:
        self.ran.append((repeat, batch))
        self.now += self.durations(repeat, batch)
        return lambda: Observation(items=1, output_tokens=128, computed_tokens=256)

    def run(self, settings: MeasureSettings, passes: int = 1, compiled: bool = False) -> Measured:
        plan = WarmupPlan(shapes=self.shapes, passes=passes, compiled=compiled)
        return measure(self.run_batch, len(self.shapes), settings, self.context, plan)


def test_where_shapes_are_compiled_each_is_met_whatever_the_limit() -> None:
    """Six batches of four shapes, a minute's compilation each, with ten seconds for warm-up. The
    first batch of each shape runs, as often as the engine needs; the others are left out. Without
    that, three compilations would stand in the timed part."""
    bench = Compiling(["a", "a", "b", "c", "c", "d"], work_s=0.5, compile_s=60.0)
    settings = MeasureSettings(warmup_limit_s=10.0, time_limit_s=100.0)
    done = bench.run(settings, passes=3, compiled=True)
    met = [batch for repeat, batch in bench.ran if repeat < 3]
    assert met == [0, 2, 3, 5] * 3
    warmth = done.warmth
    assert (warmth.warmup_end, warmth.shapes_unmet, warmth.timed_compilations) == ("limit", 0, 0)
    cut = Compiling(bench.shapes, work_s=0.5, compile_s=60.0).run(settings, passes=3)
    assert cut.warmth.shapes_unmet == 3
    # The time limit is that of the timed part, and cuts no warm-up.
    usual = Compiling(bench.shapes, work_s=0.5, compile_s=60.0)
    warmth = usual.run(MeasureSettings(time_limit_s=100.0)).warmth
    assert (warmth.warmup_end, warmth.shapes_unmet, warmth.timed_compilations) == ("complete", 0, 0)


def test_a_timed_part_that_compiled_is_repeated_once_and_then_tells() -> None:
    def run(compiles_in: Callable[[int], bool], warmup: int = 1) -> Measured:
        bench = Bench(lambda repeat, batch: 1.0)
        graphs = 0

        def work(repeat: int, batch: int) -> Callable[[], Observation]:
            nonlocal graphs
            graphs += compiles_in(repeat)
            return bench.run_batch(repeat, batch)

        bench.context.device.compilations = lambda: Compilations(
            graphs=graphs, named={"torch_graphs": graphs}
        )
        settings = MeasureSettings(warmup=warmup, min_repeats=4, max_repeats=4)
        return measure(work, 1, settings, bench.context)

    once = run(lambda repeat: repeat == 4)
    assert [sample.warmup for sample in once.samples] == [True] * 5 + [False] * 4
    assert (once.warmth.timed_parts, once.warmth.timed_compilations) == (2, 0)
    assert once.warmth.warmup_s == pytest.approx(5.0) and once.details == {}
    always = run(lambda repeat: True)
    assert (always.warmth.timed_parts, always.warmth.timed_compilations) == (2, 4)
    assert always.details == {"compiled_in_timed_part": "torch_graphs 4"}
    never = run(lambda repeat: False)
    assert (never.warmth.timed_parts, never.warmth.warmup_steps) == (1, 1)
    cold = run(lambda repeat: repeat == 0, warmup=0)
    assert (cold.warmth.timed_parts, cold.warmth.timed_compilations) == (1, 1)


def test_seconds_of_compiling_are_counted_and_nothing_else() -> None:
    def slow(graph: Any, inputs: Any) -> Any:
        time.sleep(0.3)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x * 5).sum(), backend=slow, dynamic=False)
    torch.compile(lambda x: x - 1, backend="eager")(torch.ones(2))  # imports the compiler
    before, began = torch_compilations(), time.perf_counter()
    compiled(torch.ones(3))
    took_s, grown = time.perf_counter() - began, torch_compilations().since(before)
    assert grown.graphs == 1 and grown.compile_s is not None
    assert 0.3 <= grown.compile_s <= took_s
    before = torch_compilations()
    compiled(torch.ones(3))
    grown = torch_compilations().since(before)
    assert (grown.graphs, grown.compile_s, grown.temperature()) == (0, 0.0, "")
    compiled(torch.ones(5))  # another shape
    assert torch_compilations().since(before).graphs == 1
    torch.compiler.reset()


def test_timed_repeats_that_prove_slow_at_first_were_warm_up() -> None:
    settings = MeasureSettings(warmup=1, min_repeats=3, max_repeats=8)
    done = Bench(lambda repeat, batch: 9.0 - 2.0 * min(repeat, 4)).measure(1, settings)
    timed = [sample for sample in done.samples if not sample.warmup]
    assert {sample.wall_s for sample in timed} == {1.0} and len(timed) == 3
    assert done.warmth.timed_parts > 1 and done.warmth.warmup_end == "complete"


@given(batches=st.integers(1, 4), work=st.floats(1e-3, 10.0))
def test_steady_work_pays_nothing_for_the_question(batches: int, work: float) -> None:
    done = Bench(lambda repeat, batch: work).measure(batches, MeasureSettings())
    assert len(done.samples) == 4 * batches and done.warmth.timed_parts == 1


def test_work_that_never_becomes_steady_ends_with_the_limit_of_warm_up() -> None:
    settings = MeasureSettings(max_repeats=6, warmup_limit_s=60.0)
    bench = Bench(lambda repeat, batch: 10 * 0.9**repeat + 1.0)
    done = bench.measure(1, settings)
    assert done.warmth.timed_parts > 1
    assert done.warmth.warmup_s < 60.0 + 11.0


@given(shapes=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3))
def test_every_rank_meets_every_shape_of_its_own(shapes: list[list[int]]) -> None:
    """All ranks rehearse the same steps, no step that shows nobody anything new, and the largest
    step of any rank first, so that memory for all of them is taken at once."""
    numbers = to_rehearse(shapes, sizes=shapes)
    assert max(own[numbers[0]] for own in shapes) == max(map(max, shapes))
    assert [*numbers[1:]] == sorted(numbers[1:])
    assert to_rehearse(shapes) == sorted(to_rehearse(shapes))
    for own in shapes:
        assert {own[number] for number in numbers} == {*own}
    for count, number in enumerate(numbers):
        assert any(own[number] not in {own[n] for n in numbers[:count]} for own in shapes)


def test_rehearsals_meet_each_shape_and_go_on_until_one_settles() -> None:
    bench = Bench(lambda repeat, batch: 0.0)
    met: list[int] = []

    def work(number: int) -> None:
        bench.now += [8.0, 8.0, 4.0, 1.0, 1.0][len(met)]
        met.append(number)

    plan = WarmupPlan(shapes=["a", "a", "b", "a", "b"], rehearse=work)
    found = rehearse(plan, lambda: bench.now, bench.now + 60, OneCard())
    assert met == [0, 2, 2, 2, 2] and found == (5, {"a", "b"}, False)
    met.clear()
    assert rehearse(plan, lambda: bench.now, bench.now + 5, OneCard()) == (1, {"a"}, True)
    assert met == [0]
    met.clear()
    sized = replace(plan, sizes=[1, 1, 2, 1, 2])
    rehearse(sized, lambda: bench.now, bench.now + 60, OneCard())
    assert met[:2] == [2, 0]


def test_ranks_of_a_gang_begin_anew_together() -> None:

    def rank(number: int, collective: Any) -> Measured:
        slow = 9.0 if number else 1.0
        bench = Bench(lambda repeat, batch: slow if repeat < 3 else 1.0, collective)
        return bench.measure(2, MeasureSettings(max_repeats=8))

    done = of_ranks(2, rank)
    first = [min(s.repeat for s in done[n].samples if not s.warmup) for n in range(2)]
    assert first[0] == first[1] >= 3 and done[0].warmth.timed_parts == done[1].warmth.timed_parts


def test_what_learns_is_run_again_whole_where_it_compiled() -> None:
    bench = Bench(lambda repeat, batch: 0.0)
    sample = whole_sample(wall_s=1.0, cpu_s=1.0, items=1, input_tokens=1)

    def job(*compiled: int, warmup: int = 1) -> Result:
        left = list(compiled)

        def once() -> Result:
            bench.now += 10.0
            return Result(
                samples=(sample,), stop_reason="max_repeats", warmup_s=2.0, warmup_steps=3,
                timed_parts=1, timed_compilations=left.pop(0),
            )  # fmt: skip

        request: Any = type("Request", (), {"measure": MeasureSettings(warmup=warmup)})
        context: Any = type("Context", (), {"clock": lambda: bench.now, "collective": OneCard()})
        return repeated_if_compiled(once, request, context)

    assert job(0).timed_parts == 1
    again = job(2, 0)
    assert (again.timed_parts, again.timed_compilations) == (2, 0)
    assert (again.warmup_s, again.warmup_steps) == (12.0, 7)
    assert job(2, 2).timed_compilations == 2
    assert job(2, warmup=0).timed_parts == 1
