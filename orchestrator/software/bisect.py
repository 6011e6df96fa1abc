"""The version of a package in which a job became slower.

Every version is a layer (``worker/layers.py``), and every figure the mean of a fresh process. A
step runs the good version and another in turn, so that what changes about the machine meanwhile
meets both, and compares them as ``nightgrid compare`` does two runs: Welch's interval of the ratio.
Processes show here how processes differ, so the noise beyond is that of a quiet machine. More of
them follow until the interval lies on one side of the middle between the good version and the bad
one; the slowest quarter of a version's does not count. At last the two neighbours are compared with
each other.

On a host's processor a figure is that of the fastest repeat by CPU time: other programs take the
processor away, which CPU time does not count, and spoil its caches, which some repeat escapes. On
cards it is the row's, the mean over wall time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.analysis.ratio import LEAST_NOISE, Rate, Ratio, ratio_of
from orchestrator.core.errors import NotComparable
from orchestrator.core.events import StartWorker
from orchestrator.core.job import Job
from orchestrator.core.outcome import Attempt, Failure, RankOutcome
from orchestrator.core.topology import Node
from orchestrator.worker.environment import start_request
from orchestrator.worker.layers import LIMIT_S
from orchestrator.worker.process import WorkerProcess
from orchestrator.worker.protocol import HostFacts, Run, unpickled
from orchestrator.worker.spawn import OwnSpawner
from workloads import registry
from workloads.alone import throughput
from workloads.base import Sample
from workloads.settings import DEFAULT_SOFTWARE

#: Fewest and most processes of each of two versions in one comparison.
PROCESSES, MOST_PROCESSES = 3, 10
#: A process that takes longer, its installation aside, hangs.
JOB_LIMIT_S = 3600.0

#: What a worker process makes, as on a cluster.
WORKER = "orchestrator.worker.worker:CardWorker"

#: Speed of a job in a fresh process with this version; NotComparable if it cannot be had.
Measure = Callable[[str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A version against the good one."""

    version: str
    ratio: Ratio | None = None  # its speed over the good one's; None: it has none
    slow: bool = False  # whether it is nearer to the bad version
    clear: bool = False  # whether the interval says so
    reason: str = ""  # why there is no ratio

    def text(self, good: str) -> str:
        """Format the step; ``good`` is the good version."""
        if self.ratio is None:
            return f"{self.version}: passed over: {self.reason}"
        verdict = "slow" if self.slow else "not slow"
        doubt = "" if self.clear else ", not clearly"
        return f"{self.version}: {_ratio_text(self.ratio)} the speed of {good}: {verdict}{doubt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """The last good version and the first bad one, and what leads there."""

    good: str
    bad: str
    change: Ratio  # the first bad version's speed over the last good one's
    steps: tuple[Step, ...]
    skipped: tuple[str, ...]  # between the two: the change may be in any of these

    @property
    def sure(self) -> bool:
        """Return whether every step was clear and the two neighbours differ."""
        clear = all(step.clear for step in self.steps if step.ratio is not None)
        return clear and self.change.decided and not self.skipped

    @property
    def text(self) -> str:
        """Format the change, to follow the package's name."""
        how = "" if self.sure else "; not every step was clear"
        passed = f", or with one passed over: {', '.join(self.skipped)}" if self.skipped else ""
        return (
            f"{self.bad} has {_ratio_text(self.change)} the speed of {self.good}: the job became "
            f"slower with it{passed}{how}"
        )


@dataclass(frozen=True, slots=True)
class Bisector:
    """Compares versions by their speeds in fresh processes, at least ``processes`` of each."""

    measure: Measure
    noise: float = LEAST_NOISE
    processes: int = PROCESSES
    report: Callable[[Step], None] = lambda step: None

    def find(self, versions: Sequence[str]) -> Bisection:
        """Find the change between the first version, a good one, and the last, a bad one.

        Raises:
            NotComparable: one of the two cannot be measured, or the last is not slower by the test.
        """
        first, last = versions[0], versions[-1]
        ratio = self._compare(last, first, lambda ratio: _clear(ratio, math.sqrt(ratio.value)))
        ends = Step(version=last, ratio=ratio, slow=ratio.value < 1, clear=ratio.decided)
        self.report(ends)
        if not (ends.slow and ends.clear):
            raise NotComparable(
                f"{last} is not slower than {first}: {_ratio_text(ratio)} its speed, after "
                f"{'enough' if ends.clear else max(self.processes, MOST_PROCESSES)} processes each"
            )
        middle = math.sqrt(ratio.value)
        steps = {last: ends}
        good, bad, change = 0, len(versions) - 1, ratio
        while between := [v for v in versions[good + 1 : bad] if v not in steps]:
            version = between[len(between) // 2]
            try:
                ratio = self._compare(version, first, lambda ratio: _clear(ratio, middle))
            except NotComparable as error:
                steps[version] = Step(version=version, reason=str(error))
            else:
                slow, clear = ratio.value < middle, _clear(ratio, middle)
                steps[version] = Step(version=version, ratio=ratio, slow=slow, clear=clear)
                if slow:
                    bad, change = versions.index(version), ratio
                else:
                    good = versions.index(version)
            self.report(steps[version])
        if good:
            change = self._compare(versions[bad], versions[good], lambda ratio: ratio.decided)
        return Bisection(
            good=versions[good],
            bad=versions[bad],
            change=change,
            steps=tuple(steps.values()),
            skipped=tuple(versions[good + 1 : bad]),
        )

    def _compare(self, version: str, base: str, enough: Callable[[Ratio], bool]) -> Ratio:
        """Ratio of two versions' speeds, with as many processes as are enough."""
        speeds: dict[str, list[float]] = {base: [], version: []}
        while True:
            for name in (base, version) if len(speeds[base]) % 2 else (version, base):
                speeds[name].append(self.measure(name))
            count = len(speeds[base])
            if count >= max(2, self.processes):
                ratio = ratio_of(_rate(speeds[version]), _rate(speeds[base]), noise=self.noise)
                if enough(ratio) or count >= max(self.processes, MOST_PROCESSES):
                    return ratio


def _rate(speeds: Sequence[float]) -> Rate:
    """Rate without the slowest quarter: what disturbs a process only slows it."""
    counted = sorted(speeds)[len(speeds) // 4 :]
    mean = statistics.fmean(counted)
    error = statistics.stdev(counted) / math.sqrt(len(counted)) / mean
    return Rate(value=mean, error=error, degrees=len(counted) - 1)


def _clear(ratio: Ratio, middle: float) -> bool:
    assert ratio.low is not None and ratio.high is not None
    return ratio.high < middle or ratio.low > middle


def _ratio_text(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} [{ratio.low or 0:.3f}, {ratio.high or math.inf:.3f}] ×"


def with_version(software: str, package: str, version: str) -> str:
    """Return a job's software with this version of a package."""
    pins = [] if software == DEFAULT_SOFTWARE else software.split()
    others = [pin for pin in pins if pin.partition("==")[0] != package]
    return " ".join(sorted([*others, f"{package}=={version}"]))


def _outcome(name: str, job: Job, node: Node, facts: HostFacts) -> RankOutcome:
    """Run a job in a fresh worker process of a node of this machine, without Ray."""
    card = node.cards[0]
    command = StartWorker(worker_id=name, card=card, kind=job.process_kind)
    process = WorkerProcess(start_request(command, node, facts, WORKER, {}))
    limit = threading.Timer(LIMIT_S + JOB_LIMIT_S, process.stop, ["it hangs"])
    limit.daemon = True
    limit.start()
    try:
        started = process.start()
        if isinstance(started, Failure):
            raise NotComparable(started.message)
        attempt = Attempt(attempt_id=name, job_id=job.job_id, number=1, job=job, cards=(card,))
        answer = process.run(Run(name, attempt))
    finally:
        limit.cancel()
        process.stop("it was measured")
    return unpickled(answer) if isinstance(answer, bytes) else answer


def _speed(outcome: RankOutcome, job: Job, node: Node) -> float:
    if outcome.result is None:
        raise NotComparable(outcome.failure.message if outcome.failure else "it has no result")
    declared = registry.throughput_of(job.workload)
    counts = declared.counts if declared is not None else "items"
    try:
        of_samples = _fastest if node.computes_on_host else throughput
        speed = of_samples(outcome.result.samples, counts)
    except (ValueError, ZeroDivisionError) as error:
        raise NotComparable(f"no repeat has a figure: {error}") from error
    if speed <= 0:
        raise NotComparable(f"its repeats did no work: {counts} are 0")
    return speed


def _fastest(samples: Sequence[Sample], counts: str) -> float:
    """Work over CPU time of the fastest repeat; of all steps in training, which are unequal."""
    repeats: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.complete and not sample.warmup:
            number = 0 if sample.loss is not None else sample.repeat
            repeats.setdefault(number, []).append(replace(sample, wall_s=sample.cpu_s))
    return max(throughput(repeat, counts) for repeat in repeats.values())


@contextlib.contextmanager
def measure_of(job: Job, package: str, node: Node, threads: int) -> Iterator[Measure]:
    """Yield the measure of a job, with a spawner of its own, which ends with the block."""
    settings, numbers = dict(job.parameters), itertools.count()
    named = str(settings.get("software", DEFAULT_SOFTWARE))
    with tempfile.TemporaryDirectory() as logs:
        spawner = OwnSpawner((), threads=threads, log=Path(logs, "spawner.log"))
        server = spawner.shared.path
        facts = HostFacts(threads=threads, version="", server=server, log_dir=logs)

        def speed(version: str) -> float:
            software = {"software": with_version(named, package, version)}
            own = replace(job, parameters=tuple(sorted((settings | software).items())))
            return _speed(_outcome(f"bisect-{next(numbers)}", own, node, facts), own, node)

        with contextlib.closing(spawner):
            yield speed
