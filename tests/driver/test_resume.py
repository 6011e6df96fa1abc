"""The remains of a driver that died: its attempts become rows, its processes are ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from measurements import journal_row, row

from orchestrator.core.errors import GridError, SchemaMismatch, StoreError, StoreLocked
from orchestrator.core.job import State
from orchestrator.driver.options import (
    RunOptions,
    kept_options,
    seed_of,
    with_cards_of,
    with_results_of,
)
from orchestrator.driver.run import grid_to_resume
from orchestrator.grid.parser import load_grid
from orchestrator.on_ray.agent import owned, owner_in
from orchestrator.store import files as run_files
from orchestrator.store.lock import SILENCE_S
from orchestrator.store.schema import SCHEMA_VERSION
from orchestrator.store.store import Store
from orchestrator.worker.orphans import Owner


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


def test_a_torn_note_is_of_an_attempt_that_never_began(tmp_path: Path) -> None:
    with Store(tmp_path, "night") as store:
        store.begin(journal_row(0))
        whole = journal(store).read_bytes()
        store.begin(journal_row(1))
        both = journal(store).read_bytes()
    for number, length in enumerate((len(whole), len(whole) + 1, len(whole) + 30, len(both) - 1)):
        with Store(tmp_path, f"cut{number}") as cut:
            pass
        journal(cut).write_bytes(both[:length])
        with cut:
            assert cut.interrupted == (row(0).attempt_id,)
        assert cut.read().damaged == () and not journal(cut).exists()


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
from test_resume import *
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
