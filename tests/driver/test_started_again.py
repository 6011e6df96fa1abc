"""A driver after one that died: what it takes over, waits for and does not do once more."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_workload
from driver_cases import job, node
from measurements import journal_row, row

from orchestrator.cli import run as command
from orchestrator.cli.main import build_parser
from orchestrator.core.errors import (
    ClusterError,
    GridError,
    SchemaMismatch,
    StoreError,
    StoreLocked,
)
from orchestrator.core.job import Accelerator, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.topology import Node
from orchestrator.driver import plan as plans
from orchestrator.driver import run as nodes
from orchestrator.driver.options import (
    RunOptions,
    kept_options,
    seed_of,
    with_cards_of,
    with_results_of,
)
from orchestrator.driver.run import grid_to_resume, run_grid
from orchestrator.driver.session import Session, in_process_session
from orchestrator.driver.supervisor import SupervisorLink
from orchestrator.grid.parser import load_grid
from orchestrator.on_ray.agent import owned, owner_in
from orchestrator.planning import forecast
from orchestrator.store import files as run_files
from orchestrator.store.lock import SILENCE_S
from orchestrator.store.schema import SCHEMA_VERSION
from orchestrator.store.store import Store
from orchestrator.worker.orphans import Owner

GRID = """\
name: night
defaults:
  workload: tiny
  model: tiny-chatglm3
  dataset: advertisegen-synthetic
  accelerator: HPU
  precision: fp32
  batch_size: 1
measure: {warmup: 0, min_repeats: 2, max_repeats: 2, time_limit_s: 5}
experiments:
  - name: sizes
    axes: {trouble: ["", missing]}
"""


@pytest.fixture
def pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    yield writing
    os.close(writing)
    os.close(reading)


def measured(options: RunOptions, tmp_path: Path) -> list[Measurement]:
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID)
    run_grid(grid, dataclasses.replace(options, results=tmp_path, in_process=True, quiet=True))
    return Store.existing(tmp_path, "night").measurements()


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["force", "retry_failed"])
def test_what_was_measured_anew_is_not_measured_anew_once_more(
    asked: str, tmp_path: Path, pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_workload.register(monkeypatch)
    options = RunOptions(retry_failed=asked == "retry_failed", force=asked == "force")
    before = measured(RunOptions(), tmp_path)
    began = time.time()
    link = SupervisorLink(supervisor=os.getppid(), pipe=pipe, began=began)
    first = measured(dataclasses.replace(options, supervisor=link), tmp_path)
    assert len(first) > len(before)  # as it was asked to
    second = dataclasses.replace(link, number=2)
    again = dataclasses.replace(options, supervisor=second, resume=True)
    assert measured(again, tmp_path) == first
    # One that died before it had come so far leaves it to the next.
    later = dataclasses.replace(second, began=time.time())
    assert len(measured(dataclasses.replace(again, supervisor=later), tmp_path)) > len(first)


def test_only_a_driver_that_was_started_again_waits_for_room(tmp_path: Path, pipe: int) -> None:
    """A command that finds none at its start is refused at once."""
    store, now = Store(tmp_path, "night"), time.time()
    store.path.mkdir()
    first = SupervisorLink(supervisor=1, pipe=pipe, began=now)
    second = RunOptions(supervisor=dataclasses.replace(first, number=2))
    for options in RunOptions(), RunOptions(supervisor=first):
        assert not nodes.may_wait_for_room(options, store)
    for ends_at, waits in (None, True), (now + 60, True), (now - 1, False):
        options = dataclasses.replace(second, ends_at=ends_at)
        assert nodes.may_wait_for_room(options, store) == waits
    (store.path / run_files.STOP).write_text('{"requests": 1, "by": "me"}')
    assert not nodes.may_wait_for_room(second, store)


def looking(looks: list[list[Node]]) -> Session:
    """A session whose cluster has these nodes at each look, the last ones from then on."""
    with in_process_session([Accelerator.HPU]) as session:
        return dataclasses.replace(
            session,
            nodes=tuple(looks[0]),
            look=lambda: tuple(looks.pop(0) if len(looks) > 1 else looks[0]),
        )


def waiting(
    looks: list[list[Node]],
    cards: dict[str, int],
    pipe: int,
    said: list[str],
    life: int = 2,
    *,
    resume: bool = False,
    run: Path = Path("none"),
    kinds: tuple[Accelerator, ...] = (Accelerator.HPU, Accelerator.GPU),
) -> Session:
    link = SupervisorLink(supervisor=1, pipe=pipe, began=0.0, number=life, cards=cards)
    options = RunOptions(supervisor=link, resume=resume)
    jobs = [job(accelerator=kind) for kind in kinds]
    return nodes.with_its_nodes(jobs, options, looking(looks), said.append, run)


def test_nodes_that_were_there_are_waited_for(monkeypatch: pytest.MonkeyPatch, pipe: int) -> None:
    """A plan for those that are back first would give up jobs of the others for good."""
    monkeypatch.setattr(nodes.time, "sleep", lambda _: None)
    one, two = node("hpu-1"), node("hpu-2")
    said: list[str] = []
    session = waiting([[], [one], [one, two]], {"HPU": 4}, pipe, said)
    assert [each.name for each in session.nodes] == ["hpu-1", "hpu-2"]
    assert said == ["waiting up to 3m00s for 4 HPU cards that the cluster had before"]
    assert waiting([[one]], {"HPU": 4}, pipe, said, life=1).nodes == (one,)  # nothing died


def test_a_resumed_run_waits_for_each_kind_of_card_it_had(
    monkeypatch: pytest.MonkeyPatch, pipe: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes.time, "sleep", lambda _: None)
    (tmp_path / run_files.OPTIONS).write_text(kept_options(RunOptions(), 7, {"HPU": 4}))
    looks, said = [[], [], [node("hpu-1")]], list[str]()
    session = waiting(looks, {}, pipe, said, life=1, resume=True, run=tmp_path)
    assert [each.name for each in session.nodes] == ["hpu-1"]
    assert said == ["waiting up to 3m00s for HPU cards that the cluster had before"]
    assert waiting([[]], {}, pipe, said, life=1, run=tmp_path).nodes == ()  # not resumed: at once


def test_nodes_that_stay_away_are_done_without(monkeypatch: pytest.MonkeyPatch, pipe: int) -> None:
    monkeypatch.setattr(nodes.time, "sleep", lambda _: None)
    monkeypatch.setattr(nodes, "NODES_PATIENCE_S", 0.05)
    said: list[str] = []
    session = waiting([[node("hpu-1")]], {"HPU": 4}, pipe, said)
    assert len(session.nodes) == 1 and "going on without 2 HPU cards" in said[-1]
    with pytest.raises(ClusterError, match="no node with GPU has come back"):
        waiting([[node("hpu-1")]], {"HPU": 2, "GPU": 2}, pipe, said)


def test_cards_that_no_job_of_the_grid_needs_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, pipe: int
) -> None:
    """A cluster's other nodes may leave it for good while a driver is started again."""
    monkeypatch.setattr(nodes, "NODES_PATIENCE_S", 0.05)
    said: list[str] = []
    hpu = (Accelerator.HPU,)
    session = waiting([[node("hpu-1")]], {"HPU": 2, "GPU": 2}, pipe, said, kinds=hpu)
    assert len(session.nodes) == 1 and not said


@pytest.mark.parametrize(("patience_s", "joined"), [(60.0, 2), (0.01, 1), (0.0, 1)])
def test_nodes_that_join_late_are_waited_for(monkeypatch, patience_s: float, joined: int) -> None:
    monkeypatch.setattr(nodes.time, "sleep", lambda _: None)
    one, two = node("hpu-1", 8), node("hpu-2", 8)
    session, said = looking([[one], [one, two][:joined]]), list[str]()
    late = [job(), job(cards=16)]
    session = nodes.with_cards_for(late, patience_s, session, said.append)
    assert len(session.nodes) == joined
    has = "cards for jobs of 16 HPU; the cluster has 8 HPU"
    waits, goes_on = f"waiting up to {patience_s:.0f}s".replace("60s", "1m00s"), "going on without"
    lines = {60.0: [f"{waits} for {has}"], 0.0: []}
    assert said == lines.get(patience_s, [f"{waits} for {has}", f"{goes_on} {has}"])


TYPED = ["run", "grid.yaml", "--emulate", "1x1"]


def supervised_command(
    monkeypatch: pytest.MonkeyPatch,
    *typed: str,
    started_by: tuple[str, ...] = ("-m", "orchestrator"),
    argv: list[str] | None = None,
) -> list[str] | None:
    """The command that a process started so would have its child run."""
    words = list(typed or TYPED)
    monkeypatch.setattr(sys, "argv", argv or ["nightgrid", *words])
    monkeypatch.setattr(sys, "orig_argv", ["python3", *started_by, *words])
    args = build_parser(words).parse_args(words)
    args.typed = words
    return command.command_to_supervise(args)


@pytest.mark.parametrize("started_by", [("-m", "orchestrator"), ("/usr/bin/nightgrid",)])
def test_the_child_runs_the_very_command(
    monkeypatch: pytest.MonkeyPatch, started_by: tuple[str, ...]
) -> None:
    started = ("-X", "dev", *started_by)
    found = supervised_command(monkeypatch, started_by=started)
    assert found == [sys.executable, *started, *TYPED]


@pytest.mark.parametrize(
    ("more", "variable", "argv"),
    [
        (["--no-restart"], "UNUSED", None),
        ([], command.NO_RESTART_VARIABLE, None),
        (["--in-process"], "UNUSED", None),  # a debugger wants this very process
        ([], "UNUSED", ["pytest", "tests"]),  # so does a notebook, whose command is another
    ],
)
def test_who_wants_no_supervisor_has_none(
    monkeypatch: pytest.MonkeyPatch, more: list[str], variable: str, argv: list[str] | None
) -> None:
    monkeypatch.setenv(variable, "1")
    typed = ["run", "grid.yaml", *more] if "--in-process" in more else [*TYPED, *more]
    assert supervised_command(monkeypatch, *typed, argv=argv) is None


# ---------------------------------------------------------------- the way to the cards


@pytest.mark.parametrize(
    ("options", "variable", "kind"),
    [
        (RunOptions(in_process=True, address="there"), "", forecast.IN_PROCESS),
        (RunOptions(address="there"), "", forecast.CLUSTER),
        (RunOptions(), "there", forecast.CLUSTER),
        (RunOptions(emulate="1x1"), "there", forecast.PRIVATE),
        (RunOptions(), "", forecast.PRIVATE),
    ],
)
def test_the_way_to_the_cards_is_known_without_reading_earlier_runs(
    options: RunOptions, variable: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    read: list[Path] = []

    def no_runs(results: Path) -> list[str]:
        read.append(results)
        return []

    monkeypatch.setattr("orchestrator.driver.plan.runs", no_runs)
    assert plans.start_of(options) == kind
    assert not read
    assert plans.startup_of(options).kind == kind
    assert read == [options.results]


# ---------------------------------------------------------------- what a driver that died has left


def journal(store: Store) -> Path:
    return store.path / "begun.log"


def test_a_note_whose_row_was_compacted_away_is_no_second_row(tmp_path: Path) -> None:
    with Store(tmp_path, "night") as store:
        store.begin(journal_row(0))
        kept = journal(store).read_bytes()
        store.append(row(0))
        store.append(row(1))
        store.compact()
    journal(store).write_bytes(kept)
    with Store(tmp_path, "night") as store:
        assert store.interrupted == () and not journal(store).exists()
        assert len(store.measurements()) == 2


def test_a_journal_of_a_newer_version_stays_where_it_is(tmp_path: Path) -> None:
    """A program that cannot read it must not go on as if nothing had run."""
    with Store(tmp_path, "night") as store:
        store.begin(journal_row(0, schema_version=SCHEMA_VERSION + 1))
    for _ in range(2):  # nor is the run locked by it
        with pytest.raises(SchemaMismatch, match="a row has schema version"):
            Store(tmp_path, "night").__enter__()
        assert journal(store).exists()


def test_the_mark_is_on_what_is_started_within_the_block() -> None:
    owner = Owner(run_id="run", invocation_id="i")
    with owner.marks_this_process():
        assert os.environ["NIGHTGRID_OWNER"] == "run.i"
        assert owner_in(owned("agent hpu-1")) == owner
    assert "NIGHTGRID_OWNER" not in os.environ and owner_in(owned("agent hpu-1")) is None


#: Another driver begins three attempts, writes the row of one, and dies.
DIES = """
import os, sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from measurements import journal_row, row
from orchestrator.store.store import Store
store = Store(Path(sys.argv[1]), "night").__enter__()
store.begin(*map(journal_row, range(3)))
store.append(row(0))
os.kill(os.getpid(), 9)
"""


def silent(results: Path, seconds: float) -> None:
    """Make the lock that of another host which was last seen so long ago."""
    lock = results / "night" / run_files.LOCK
    there = {"host": "node-7", "boot_id": "another", "machine_id": "another"}
    lock.write_text(json.dumps({**json.loads(lock.read_text()), **there}))
    seen = time.time() - seconds
    os.utime(lock, (seen, seen))


@pytest.mark.slow
def test_a_dead_driver_is_taken_over_to_resume_and_its_attempts_become_rows_once(
    tmp_path: Path,
) -> None:
    """Not before a minute of silence, and not without being told to."""
    paths = [str(Path(__file__).parents[1]), *sys.path]
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path), *paths], check=False)
    assert done.returncode == -9
    silent(tmp_path, SILENCE_S / 2)
    with pytest.raises(StoreLocked, match="on node-7"), Store(tmp_path, "night").resume():
        pass
    silent(tmp_path, SILENCE_S + 5)
    with pytest.raises(StoreLocked, match="nightgrid run --resume"), Store(tmp_path, "night"):
        pass
    with Store(tmp_path, "night").resume() as store:
        assert store.taken_over_from is not None and store.taken_over_from.host == "node-7"
        assert len(store.interrupted) == 2
        store.forget_interrupted()
    with Store(tmp_path, "night") as store:
        assert store.interrupted == ()
    states = [(each.batch_size, each.state, each.final) for each in store.measurements()]
    assert sorted(states) == [
        (1, State.SUCCEEDED, True),
        (2, State.LOST, False),
        (3, State.LOST, False),
    ]


def test_results_in_the_home_of_nobody_are_refused_where_the_grid_names_them(
    tmp_path: Path,
) -> None:
    grid = tmp_path / "grid.yaml"
    of = "workload: text-generation, accelerator: CPU, model: tiny-chatglm3"
    rest = f"experiments: [{{name: e, {of}}}]\n"
    grid.write_text("name: night\nresults: ~nobody-here/x\n" + rest)
    with pytest.raises(GridError, match="no home directory ~nobody-here") as refused:
        with_results_of(load_grid(grid), RunOptions())
    assert [problem.line for problem in refused.value.problems] == [2]
    grid.write_text("name: night\nresults: ~/x\n" + rest)
    assert with_results_of(load_grid(grid), RunOptions()).results == Path.home() / "x"


def test_the_newest_run_is_resumed_with_its_grid_and_cards(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no run to resume .*`results:` of its grid as --results"):
        grid_to_resume(RunOptions(results=tmp_path))
    with pytest.raises(StoreError, match=r"there are no runs in .*`results:` of its grid"):
        grid_to_resume(RunOptions(results=tmp_path, name="night"))
    with Store(tmp_path, "night") as store:
        store.append(row())
        store.write_file("grid.yaml", "name: night")
        store.write_file("options.json", json.dumps({"emulate": "2x8", "in_process": False}))
    assert grid_to_resume(RunOptions(results=tmp_path)) == (store.path / "grid.yaml", "night")
    assert with_cards_of(store.path, RunOptions()).emulate == "2x8"
    here = with_cards_of(store.path, RunOptions(in_process=True))
    assert here.emulate is None and here.in_process


def test_a_run_keeps_the_seed_of_its_order(tmp_path: Path) -> None:
    with Store(tmp_path, "night") as store:
        seed = seed_of(store.path)
        store.write_file("options.json", kept_options(RunOptions(emulate="1x2"), seed, {}))
        assert seed_of(store.path) == seed_of(store.path) == seed
        assert with_cards_of(store.path, RunOptions()).emulate == "1x2"
        for other in ('{"emulate": null}', "[1]", '{"seed": "x"}', "{"):
            store.write_file("options.json", other)
            assert len({seed_of(store.path) for _ in range(4)}) > 1
