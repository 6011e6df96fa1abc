"""Plan a grid without a cluster, or a run with its nodes and earlier rows."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core import errors
from orchestrator.core.deadline import Deadline
from orchestrator.core.job import Accelerator, Job, Scalar, State
from orchestrator.core.plan import Action, PastRow, Plan
from orchestrator.core.status import RunStatus
from orchestrator.core.topology import Node, assumed_servers, parse_emulation
from orchestrator.driver.options import RunOptions, commits_of, submitter_of, with_results_of
from orchestrator.grid.dependencies import Thing
from orchestrator.grid.parser import Grid, load_grid, overridden, parse_grid
from orchestrator.grid.vocabulary import Vocabulary
from orchestrator.grid.yaml import read as read_yaml
from orchestrator.planning.engine_choice import PackageCheck, with_engines
from orchestrator.planning.forecast import CLUSTER, IN_PROCESS, PRIVATE, Forecast, Startup, forecast
from orchestrator.planning.planner import estimator_for, make_plan
from orchestrator.store import disk
from orchestrator.store import files as run_files
from orchestrator.store.files import directory_of, is_address, submitter
from orchestrator.store.history import past_rows
from orchestrator.store.identity import ids_at
from orchestrator.store.reader import runs
from orchestrator.store.store import Store
from orchestrator.util import output
from orchestrator.util.format import plural
from orchestrator.util.host import host_problems, load_problem, usable_cores
from orchestrator.worker.environment import with_own_packages
from orchestrator.worker.layers import layer_notes
from workloads.base import BadConfiguration
from workloads.devices import all_devices, device_class, host_device, shown_cards
from workloads.models.encryption import passed_on
from workloads.models.products import Saving, saving_of
from workloads.models.rules import is_protected
from workloads.registry import find_workload
from workloads.util import files
from workloads.util.files import SMALL_BYTES

if TYPE_CHECKING:
    from orchestrator.driver.session import Session

#: The nodes to plan for, given the kinds of card that a grid names.
NodesFor = Callable[[Sequence[Accelerator]], "list[Node]"]

#: Newest runs of the same results whose start times are used.
MOST_STARTS = 10

#: States of the jobs that --retry-failed runs again.
_RETRIED = (State.FAILED, State.TIMED_OUT, State.OUT_OF_MEMORY, State.PRUNED)


def plan_grid(
    source: Grid | str | os.PathLike[str], options: RunOptions
) -> tuple[Plan, list[PastRow]]:
    """Plan a grid as ``run_grid`` would, on the nodes of ``options.address``, else on those of
    ``planned_nodes``; also returns the earlier rows of its run.

    Raises GridError or OptionError if the grid, or the emulated nodes, are refused; ClusterError or
    SubmitError if the cluster cannot be joined, or its dashboard does not answer; StoreError if
    earlier rows cannot be read.
    """
    nodes_for: NodesFor = partial(planned_nodes, emulate=options.emulate)
    if options.address:
        from orchestrator.on_ray.jobs import nodes_at

        if options.emulate:
            raise errors.OptionError("--emulate cannot be combined with --address")
        nodes = nodes_at(options.address)
        nodes_for = lambda accelerators: nodes  # noqa: E731
    grid = grid_of(source, options, nodes_for=nodes_for, elsewhere=bool(options.address))
    refuse_without_key(grid, options.key_file)
    options = with_results_of(grid, options)
    run = options.name or grid.name
    history = history_of(Store(options.results, run))
    plan = make_plan(
        grid,
        nodes_for(grid.accelerators()),
        history,
        retry_failed=options.retry_failed,
        force=options.force,
        startup=startup_of(options),
        saving_of=cache(partial(_saving_now, options.keep_changed)),
        run_ids=ids_at(options.results / run),
        host_notes=_host_notes(grid, here=not options.address),
    )
    if options.address:
        refuse_files(options.address, grid, running(plan))
    return plan, history


def _host_notes(grid: Grid, *, here: bool) -> list[str]:
    """Notes on the software that nodes install, and on this host's problems and load, if jobs
    run here."""
    notes = layer_notes(grid.jobs())
    if here:
        hosts = any(kind.spec.host for kind in grid.accelerators())
        notes += [*host_problems(), *filter(None, [load_problem() if hosts else ""])]
    return notes


def running(plan: Plan) -> list[Job]:
    """Return the jobs of the grid that a plan runs, without those that it adds."""
    jobs = [planned.job for planned in plan.jobs if planned.action is Action.RUN]
    return [job for job in jobs if not find_workload(job.workload).implied]


def refuse_files(where: str | Sequence[Node], grid: Grid, jobs: Iterable[Job]) -> None:
    """Have nodes look at absolute paths of jobs: those of the cluster at a GCS or job server
    address, or these of the joined one. Raises GridError for what no node could run, and as
    ``nodes_at``."""
    from orchestrator.on_ray.file_look import refused, with_absolute_paths

    problems = []
    for one in refused(where, with_absolute_paths(jobs)):
        value: Scalar = {**one.job.identity(), **dict(one.job.parameters)}[one.setting]  # type: ignore[assignment]
        problem = grid.problem(one.job, one.setting, value, one.reason, one.hint)
        if one.everywhere:
            problems.append(problem)
        else:
            output.say_aside(f"note: {problem}")
    if problems:
        raise errors.GridError(problems)


def packages_lacking(grid: Grid, nodes: Sequence[Node]) -> tuple[list[str], bool]:
    """Sentences on packages that jobs need and no node has, and whether that is all jobs."""
    check = PackageCheck(nodes)
    jobs, _ = with_engines(grid.jobs(), grid.open_engines, nodes)
    lacking: dict[str, list[Job]] = {}
    for job in jobs:
        if reason := check.lacking(job):
            lacking.setdefault(reason, []).append(job)
    sentences = [
        f"{plural(len(those), 'job')}, such as {those[0].label}: {reason}"
        for reason, those in lacking.items()
    ]
    return sentences, sum(map(len, lacking.values())) == len(jobs)


def note_packages_at(address: str, grid: Grid) -> None:
    """Ask the cluster's nodes for the packages of jobs that need more than the usual ones, and note
    what is missing; SubmitError if no job could run, and as ``nodes_at``."""
    from orchestrator.on_ray.jobs import nodes_at

    check = PackageCheck(())
    if not any(map(check.needs_more, grid.jobs())):
        return
    sentences, all_jobs = packages_lacking(grid, nodes_at(address))
    if all_jobs:
        raise errors.SubmitError(f"{grid.file}: no job can run. {'; '.join(sentences)}")
    for sentence in sentences:
        output.say_aside(f"note: {grid.file}: {sentence}")


def _saving_now(keep_changed: bool, thing: Thing) -> Saving:
    """Return what a name stands for; of files nothing if their changes are passed over."""
    saving = saving_of(*thing)
    return saving._replace(content="") if keep_changed else saving


def start_of(options: RunOptions) -> str:
    """``Startup.kind`` of a run with these options."""
    if options.in_process:
        return IN_PROCESS
    if options.emulate is None and (options.address or os.environ.get("RAY_ADDRESS")):
        return CLUSTER
    return PRIVATE


def startup_of(options: RunOptions) -> Startup:
    """``Startup`` of a run, with the start times of the newest runs of the same kind."""
    kind = start_of(options)
    starts_s = []  # from the command to the first attempt
    for run in runs(options.results)[:MOST_STARTS]:
        with contextlib.suppress(OSError, ValueError):
            text = disk.read(options.results / run / run_files.STATUS, SMALL_BYTES).decode()
            status = RunStatus.from_json(text)
            if status.start == kind and status.first_attempt_s is not None:
                starts_s.append(status.first_attempt_s)
    return Startup(
        kind=kind,
        earlier_s=tuple(starts_s),
        processors=len(usable_cores()),
        load=0.0 if kind == CLUSTER else os.getloadavg()[0],
    )


def planned_nodes(accelerators: Sequence[Accelerator], emulate: str | None) -> list[Node]:
    """Nodes to plan for without a cluster: emulated ones, else this machine's cards, else an
    assumed server of each kind; raises OptionError for an invalid specification."""
    if emulate is not None:
        return list(with_own_packages(parse_emulation(emulate, accelerators)))
    real = [kind for kind in accelerators if not kind.spec.host]
    own = list(with_own_packages(own_nodes(accelerators))) if real else []
    own_kinds = {node.accelerator for node in own}
    return own + assumed_servers([kind for kind in accelerators if kind not in own_kinds])


def grid_of(
    source: Grid | str | os.PathLike[str],
    options: RunOptions,
    *,
    nodes_for: NodesFor | None = None,
    elsewhere: bool = False,
) -> Grid:
    """Load a grid file, or return the given grid; raises GridError, which includes impossible card
    counts with emulated cards or ``nodes_for``."""
    if isinstance(source, Grid):
        return source
    if options.emulate:
        nodes_for = partial(planned_nodes, emulate=options.emulate)
    return load_grid(
        Path(source),
        nodes_for=nodes_for,
        overrides=options.overrides,
        commits=commits_before(Path(source), options),
        elsewhere=elsewhere,
    )


def refuse_without_key(grid: Grid, key_file: Path | None) -> None:
    """Raise GridError for protected models where no file of their key is named."""
    models = {job.model for job in grid.jobs()} if not (key_file or passed_on()) else set()
    problems = [
        errors.Problem(
            file=grid.file,
            message=f"the weights of {model} are protected, and no file of their key is named",
            hint="add --key-file FILE to the command",
        )
        for model in sorted(models)
        if is_protected(model)
    ]
    if problems:
        raise errors.GridError(problems)


def commits_before(source: Path, options: RunOptions) -> Mapping[str, str]:
    """Commits of a resumed run: if branches moved, measured jobs would run again."""
    if not options.resume:
        return {}
    if source.name == run_files.GRID and (source.parent / run_files.OPTIONS).exists():
        return commits_of(source.parent)  # the run's own copy of its grid
    data = overridden(read_yaml(source), options.overrides).data
    run, results = options.name or data.get("name"), data.get("results")
    place = options.results
    if not options.results_named and isinstance(results, str) and results:
        with contextlib.suppress(ValueError):  # refused later, at its line
            place = place if is_address(results) else directory_of(results)
    return commits_of(place / run) if isinstance(run, str) else {}


def plan_run(
    options: RunOptions, grid: Grid, session: Session, store: Store, history: Sequence[PastRow]
) -> Plan:
    """Plan the grid of a run on the nodes of its session, by the rows that it has."""
    retry_failed, force = options.retry_failed, options.force
    counting = history
    if options.supervisor is not None and options.restarted and (retry_failed or force):
        # Jobs that earlier drivers of this command measured again are not measured once more.
        began = options.supervisor.began
        this_time = {
            (row.job_id, row.attempt_number)
            for row in store.measurements()
            if (row.recorded_at or 0.0) >= began
        }
        counting = [
            row
            for row in history
            if (row.job_id, row.attempt_number) in this_time or not (force or row.state in _RETRIED)
        ]
        retry_failed = force = False
    return make_plan(
        grid,
        session.nodes,
        counting,
        retry_failed=retry_failed,
        force=force,
        estimator=estimator_for(history, session.nodes),
        startup=startup_of(options),
        saving_of=cache(partial(_saving_now, options.keep_changed)),
        run_ids=ids_at(store.path),
        host_notes=_host_notes(grid, here=not session.address),
    )


def history_of(store: Store) -> list[PastRow]:
    """Rows of a run, oldest first; raises StoreError if some cannot be read: their jobs would run
    again under used attempt ids."""
    return past_rows(store.tables_path, whole=True) if store.exists else []


def forecast_of(plan: Plan, history: Sequence[PastRow], deadline: Deadline) -> Forecast | None:
    """Forecast a run that starts now; None if the plan is too large to simulate."""
    return forecast(plan, estimator_for(history, plan.nodes), deadline.work_until - time.time())


# Cards of this machine are listed by their vendors' tools: no card is opened, and neither torch nor
# Ray imported.


def own_nodes(accelerators: Sequence[Accelerator]) -> list[Node]:
    """This machine as a node of each of these kinds that it has; of the processor only if the grid
    names nothing else, since cards share it."""
    if all(kind.spec.host for kind in accelerators):
        return [_node(kind, (0,)) for kind in accelerators]
    nodes = []
    for kind in accelerators:
        cards = {} if kind.spec.host else own_cards(kind)
        usable = tuple(index for index, lost in cards.items() if not lost)
        faults = [f"{kind}{index} is left out: {lost}" for index, lost in cards.items() if lost]
        if usable:
            nodes.append(replace(_node(kind, usable), faults=tuple(faults)))
    return nodes


def own_machine() -> list[Node]:
    """This machine as nodes with its cards, else with its processor."""
    kinds = [Accelerator(spec.accelerator) for spec in all_devices() if not spec.host]
    return own_nodes(kinds) or own_nodes([Accelerator(host_device().accelerator)])


def own_cards(kind: Accelerator) -> dict[int, str]:
    """Indices of this machine's visible cards of a kind, and why a card is lost, "" if it is not;
    raises ClusterError if variables hide all or name others."""
    spec, device = kind.spec, device_class(kind.device)
    cards = device.telemetry()
    shown = tuple(sorted(cards))
    for variable in (spec.visible_variable, spec.container_variable):
        value = os.environ.get(variable) if variable else None
        hidden = value is not None and value.strip().lower() in HIDDEN
        # What a container's variable does not hide, the tool lists.
        if value is None or not (variable == spec.visible_variable if cards else hidden):
            continue
        try:
            shown = shown_cards(variable, value, cards, device.uuids)
        except BadConfiguration as error:
            raise errors.ClusterError(f"this machine's {kind} cards: {error}") from error
    return {index: cards[index].lost for index in shown}


#: Values of variables that a scheduler or a container's runtime sets where a job has no card.
HIDDEN = ("-1", "nodevfiles", "void")


def no_cards_text(accelerators: Sequence[Accelerator]) -> str:
    """Describe where cards of these kinds were looked for on this machine, and not found."""
    specs = [kind.spec for kind in accelerators if not kind.spec.host]
    tools = [f"{spec.tool} lists none" for spec in specs if spec.tool]
    why = f" ({', '.join(tools)})" if tools else ""
    return f"this machine has no {' or '.join(spec.accelerator for spec in specs)} card{why}"


def _node(kind: Accelerator, cards: tuple[int, ...]) -> Node:
    host = kind.spec.host
    return Node(
        node_id=f"{kind.lower()}-1",
        name=socket.gethostname(),
        accelerator=kind,
        card_indices=cards,
        server_cards=1 if host else max(kind.spec.server_cards or 0, max(cards) + 1),
        device_name=kind.value if host else "",
    )


#: Changed experiments that are named; the others are counted.
MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GridChange:
    """Difference of a grid from the one stored in its run."""

    name_before: str
    equal: int  # jobs of both
    new: tuple[Job, ...]
    gone: tuple[Job, ...]

    def lines(self) -> Iterator[str]:
        """Describe what the run will now measure or not."""
        if not self.new and not self.gone:
            return
        yield (
            f"grid changed since this run began: {plural(self.equal, 'job')} as before, "
            f"{len(self.new)} new, {len(self.gone)} gone"
        )
        yield from _experiments("new", self.new)
        yield from _experiments("gone", self.gone)
        if self.gone:
            yield "  rows of jobs that are gone stay in the run and in its report"


def change_of(grid: Grid, run: Path) -> GridChange | None:
    """Compare a grid with the one stored in a run; None if equal, missing or unreadable."""
    path = run / run_files.GRID
    with contextlib.suppress(OSError, ValueError, errors.NightgridError):
        if files.read_text(path) == grid.text:
            return None
        # Its relative paths are those of the given grid, wherever this process and the copy are.
        vocabulary = Vocabulary.installed(check_data=False, commits=commits_of(run))
        before = parse_grid(files.read_text(path).encode(), grid.file, vocabulary=vocabulary)
        known = {job.job_id for job in before.jobs()}
        now = {job.job_id for job in grid.jobs()}
        return GridChange(
            name_before=before.name,
            equal=len(known & now),
            new=tuple(job for job in grid.jobs() if job.job_id not in known),
            gone=tuple(job for job in before.jobs() if job.job_id not in now),
        )
    return None


def refuse_another(grid: Grid, change: GridChange, run: str, measured: Collection[str]) -> None:
    """Raise GridError for a grid of another name that shares no job with the run's grid or
    ``measured`` ids; the message names both and the ways out."""
    if not measured or change.equal or change.name_before == grid.name:
        return
    if any(job.job_id in measured for job in grid.jobs()):
        return
    message = (
        f"run {run!r} was made by another grid, {change.name_before!r}, and has none of the "
        f"{plural(len(grid.jobs()), 'job')} of {grid.name!r}"
    )
    hint = (
        f"give this grid a run of its own (--run with another name); to extend run {run!r}, add "
        f"experiments to its grid, or name this one {change.name_before!r}, too"
    )
    raise errors.GridError([grid.document.problem(("name",), message, hint)])


def refuse_anothers(grid: Grid, run: Path, change: GridChange | None) -> None:
    """Raise GridError for a run of another person; of one name on two hosts if they share no job.

    A run that says of nobody who submitted it is open to all.
    """
    owner = submitter_of(run)
    shares_jobs = change is None or change.equal > 0
    if owner and owner != submitter() and not (_same_user(owner) and shares_jobs):
        name_before = grid.name if change is None else change.name_before
        raise errors.GridError([_anothers(grid, run.name, owner, name_before)])


def refuse_sent_by_another(grid: Grid, run: str, owner: str) -> None:
    """As ``refuse_anothers``, for a run that ``owner`` sent to a cluster; empty if unknown."""
    if owner and not _same_user(owner):
        raise errors.GridError([_anothers(grid, run, owner, "")])


def _same_user(owner: str) -> bool:
    return owner.rsplit("@", 1)[0] == submitter().rsplit("@", 1)[0]


def _anothers(grid: Grid, run: str, owner: str, name_before: str) -> errors.Problem:
    what = f" and its grid {name_before!r}" if name_before else ""
    user = re.sub(r"[^\w.+-]+", "-", submitter().rsplit("@", 1)[0])
    message = f"run {run!r} belongs to {owner}{what}; {grid.name!r} is sent by {submitter()}"
    hint = (
        f"give it a run of its own with --run {run}-{user}; to go on with that person's run, add "
        "--resume (with `submit` after --)"
    )
    return grid.document.problem(("name",), message, hint)


def _experiments(what: str, jobs: Collection[Job]) -> Iterator[str]:
    counts = Counter(job.experiment for job in jobs).most_common()
    named = [f"{plural(count, 'job')} of {name}" for name, count in counts[:MOST_NAMED]]
    if rest := counts[MOST_NAMED:]:
        total = plural(sum(count for _, count in rest), "job")
        named.append(f"{total} of {len(rest)} more experiments")
    if named:
        yield f"  {what}: {', '.join(named)}"
