"""Traits of all commands, in whose tables a new one has to take its place."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from chatglm3_reference import random_state, write_checkpoint
from command_line import Head, Nightgrid, job_there, parsers
from example_grids import NOTEBOOK_GRID
from measurements import row

from orchestrator.cli.main import COMMANDS, EPILOG, parsed
from orchestrator.core import errors
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.core.status import RunStatus
from orchestrator.on_ray.jobs import JobInfo
from orchestrator.scheduler.simulator import SimulationResult
from orchestrator.store.store import Store
from orchestrator.watch.state import RunEntry

ROOT = Path(__file__).resolve().parents[2]

#: Commands without ``--json``, and why.
WITHOUT_JSON = {
    "logs": "prints what the job printed",
    "watch": "serves a page until it is ended",
    "completion": "prints a script for a shell",
}


#: Commands whose JSON needs a cluster or an index to ask, and where it is tried.
TRIED_ELSEWHERE = {
    "doctor": "tests/ray",
    "predict": "tests/report/test_predicted_cells.py",
    "describe": "tests/workloads/models/test_describe.py",
    "verify": "tests/cli/test_verify_command.py",
    "bisect": "tests/software/test_bisect.py",
    "stop": "tests/cli/test_runs_here_and_there.py",
    "fetch": "tests/ray",
}


def has(*names: str) -> Callable[[Any], None]:
    """Return a check that what is printed, or its first element, has these keys."""

    def check(printed: Any) -> None:
        keys = set(printed[0] if isinstance(printed, list) else printed)
        assert set(names) <= keys, set(names) - keys

    return check


def names_of(record: type) -> set[str]:
    return {field.name for field in fields(record)}


def rows_have_the_fields_of_the_record(printed: Any) -> None:
    nested = {"metrics", "samples", "items", "measure", "parameters", "versions", "details"}
    nested |= {"workload_metrics", "image"}  # bytes, for the page and the tables
    wanted = (names_of(Measurement) - nested) | names_of(Metrics)
    for one in printed["rows"]:
        assert wanted <= set(one), wanted - set(one)


#: Command -> arguments that end well here, and what the JSON on standard output must hold.
JSON: dict[str, tuple[list[str], Callable[[Any], None]]] = {
    "init": (["first.yaml", "--model", "tiny-chatglm3"], has("file", "model", "precisions")),
    "plan": (["grid.yaml"], has("grid", "nodes", "summary", "jobs", "notes")),
    "simulate": (["grid.yaml"], has(*(names_of(SimulationResult) - {"rows"}), "ratio", "counts")),
    "run": (["grid.yaml", "--in-process"], rows_have_the_fields_of_the_record),
    "submit": (
        ["grid.yaml", "--address", Head.address],
        has("submission_id", "sent", "address", "run", "entrypoint"),
    ),
    "status": (["one"], has("run", "rows", "final_rows", "age_s", "status")),
    "runs": ([], has(*names_of(RunEntry))),
    "report": (["one"], rows_have_the_fields_of_the_record),
    "compare": (["one", "two"], has("before", "after", "changes", "refused")),
    "query": (["select * from jobs"], has("job_id", "throughput")),
    "repro": (["one", row(0).job_id], has("directory", "files")),
    "export": (["out", "--to", "datasets"], has("destination", "written")),
    "convert": (["checkpoint", "converted"], has("path", "parameters", "bytes", "weight_files")),
    "protect": (
        ["model", "sealed", "--key-file", "key", "--new-key"],
        has("path", "protected", "bytes", "took_s"),
    ),
    "dataset": (["synthetic", "made", "--count", "4"], has("directory", "counts", "synthetic")),
    "schema": (["precisions"], has("precision", "device", "text")),
}


@pytest.fixture
def place(workplace: Path, head: type[Head]) -> Path:
    """The workplace with a grid and two runs, and a job that is over on a head."""
    head.known.append(job_there("night", status="SUCCEEDED", ended_at=1010.0, exit_code=0))
    (workplace / "grid.yaml").write_text(NOTEBOOK_GRID)
    for run in ("one", "two"):
        with Store(workplace / "results", run) as store:
            store.append(row(0, run=run))
    return workplace


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    options = {word for action in parser._actions for word in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            options.update(*map(options_of, action.choices.values()))
    return options


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_or_a_reason_not_to(command: str) -> None:
    assert sum(command in table for table in (JSON, WITHOUT_JSON, TRIED_ELSEWHERE)) == 1
    assert ("--json" in options_of(parsers()[command])) == (command not in WITHOUT_JSON)


@pytest.mark.slow
@pytest.mark.parametrize("command", JSON)
def test_json_is_all_of_standard_output(command: str, place: Path, nightgrid: Nightgrid) -> None:
    arguments, check = JSON[command]
    if command == "convert":
        write_checkpoint(place / "checkpoint", random_state())
    if command == "protect":
        pytest.importorskip("cryptography")
        (place / "model").mkdir()
        for name in ("config.json", "model.safetensors"):
            (place / "model" / name).write_text("{}")
    if command == "query":
        pytest.importorskip("duckdb")
    check(nightgrid(command, *arguments, "--json").json)


def test_status_json_of_a_submitted_job(place: Path, nightgrid: Nightgrid) -> None:
    at = ("--address", Head.address, "--json")
    one = nightgrid("status", "night", *at).json
    assert one.pop("run_status") is None and set(one) == names_of(JobInfo)
    assert nightgrid("status", *at).json == [one]


def test_status_json_has_the_fields_of_the_status(place: Path, nightgrid: Nightgrid) -> None:
    nightgrid("run", "grid.yaml", "--in-process", "--quiet")
    answer = nightgrid("status", "tiny-run", "--json").json
    assert set(answer["status"]) == names_of(RunStatus)
    assert answer["status"]["finished"] and answer["final_rows"] == 2


def test_run_with_json_says_its_progress_elsewhere(place: Path, nightgrid: Nightgrid) -> None:
    failing = NOTEBOOK_GRID.replace("batch_size: 1..2", "trouble: [missing]")
    (place / "grid.yaml").write_text(failing)
    printed = nightgrid("run", "grid.yaml", "--in-process", "--json", code=errors.JOBS_FAILED)
    assert printed.json["counts"] == {"FAILED": 1}
    assert "Run tiny-run" in printed.err and "no dataset 'nix'" in printed.err


def test_every_code_is_in_the_table_and_in_the_documentation() -> None:
    classes = [errors.NightgridError]
    for kind in classes:
        classes += kind.__subclasses__()
    assert {kind.exit_code for kind in classes} <= set(errors.MEANINGS)
    returned: set[object] = set()
    for path in (ROOT / "orchestrator" / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and re.match("run(_|$)|main$", node.name):
                values = [r.value for r in ast.walk(node) if isinstance(r, ast.Return)]
                returned |= {v.value for v in values if isinstance(v, ast.Constant)}
    assert returned and returned <= set(errors.MEANINGS)
    text = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"| {code} | {meaning} |" in text for code, meaning in errors.MEANINGS.items())


@pytest.mark.parametrize("command", ["--help", *COMMANDS])
def test_help_has_examples_that_are_taken_and_codes_that_are_known(command: str) -> None:
    epilog = EPILOG
    if command in COMMANDS:
        epilog = parsers()[command].epilog or ""
        assert f"nightgrid {command}" in epilog
        assert f"| `{command}` |" in (ROOT / "docs" / "cli.md").read_text()
    examples = re.findall(r"^  (nightgrid .+?)(?:  .*)?$", epilog, re.MULTILINE)
    assert examples
    for example in examples:
        command_line = re.split(r" [|>] |  then ", example)[0]
        words = shlex.split(command_line)
        assert parsed(words[1:]).command in COMMANDS
        assert all((ROOT / word).is_file() for word in words if word.startswith("grids/"))
    _, heading, listed = epilog.partition("exit codes:")
    codes = {int(code) for code in re.findall(r"(?:^|;)\s*(\d+)\s", listed, re.MULTILINE)}
    assert codes <= set(errors.MEANINGS) and bool(codes) == bool(heading)


def test_submit_hands_on_what_follows_two_dashes() -> None:
    args = parsed(["submit", "g.yaml", "--address", "http://h", "--", "--retry-failed", "--run=--"])
    assert args.address == "http://h" and args.handed_on == ("--retry-failed", "--run=--")


def test_no_command_at_all_is_answered_with_the_help(nightgrid: Nightgrid) -> None:
    screen = nightgrid().out
    assert "a first evening:" in screen and len(screen.splitlines()) < 24


#: Command lines, their exit codes, and the part of the message that says what to do next.
WRONG = [
    ("plan nothing.yaml", 2, "No such file or directory"),
    ("plan .", 2, "not an ordinary file\n    grids that come with Nightgrid: chatglm3-finetune, "),
    ("plan grid.yaml --adress x", 2, "plan: error: unrecognized arguments: --adress x"),
    ("plan rows.parquet", 2, "nothing was started"),
    ("plan grid.yaml --emulate 2by8", 2, "'2by8' is not understood; write 2x8"),
    ("plan grid.yaml --emulate 1x8,", 2, "'' is not understood"),
    ("plan grid.yaml --emulate 0x8", 2, "has no cards"),
    ("plan grid.yaml --emulate 2x8:TPU", 2, "no accelerator 'TPU'; there is: HPU, GPU, CPU"),
    ("plan grid.yaml --emulate 99999x8", 2, "799,992 cards; more than 4096 cards"),
    ("repotr smoke", 2, "there is no command 'repotr'; did you mean report?"),
    ("report --results=a\0b", 2, "an argument has a null character"),
    ("benchmark", 2, "`nightgrid --help` lists them"),
    ("simulate grid.yaml --faults 2", 2, "not a number from 0 to 1"),
    ("run grid.yaml", 3, "give --emulate 2x8"),
    ("run grid.yaml --in-process --card-memory big", 2, "such as 2 or 0.5"),
    ("run grid.yaml --in-process --run ../x", 4, "../x"),
    ("submit nothing.yaml --address http://h:8265", 2, "No such file"),
    ("status nix", 4, "Newest first:"),
    ("status --results=--", 2, "--results: expected one argument"),  # a list to argparse
    ("status --results nowhere", 4, "nightgrid run GRID"),
    ("report nix", 4, "Newest first:\n    two\n    one"),
    ("report --results nowhere", 4, "--results DIR or NIGHTGRID_RESULTS"),
    ("report one --output grid.yaml/x --format md", 4, "cannot write"),
    ("report one --format pdf", 2, "choose from"),
    ("watch nix", 4, "Newest first:"),
    ("watch --port 99999999", 2, "99999999"),
    ("compare one nix", 4, "Newest first:"),
    ("compare one two --fail-on-regression five", 2, "such as 5%"),
    ("compare one two --fail-on-regression 100%", 2, "share between 0 and 1"),
    ("compare one two --allow speed", 6, "can be allowed"),
    ("query ''", 2, "no statement"),
    ("query '-- nothing;'", 2, "no statement"),
    ("query 'drop everything'", 2, "nightgrid schema results"),
    ("query 'select 1' --run onee", 4, "\n    one"),
    ("query 'select 1' --results nowhere", 4, "nightgrid run GRID"),
    ("export grid.yaml --to datasets", 4, "grid.yaml"),
    ("export out --atlas ''", 2, "cannot be read"),
    ("describe no-such-model", 1, "tiny-chatglm3"),
    ("describe tiny-chatglm3 --lora-rank 0", 2, "whole number from 1"),
    ("convert nowhere out", 1, "nowhere"),
    ("protect nowhere out --key-file missing", 1, "the key file missing cannot be"),
    ("dataset advertisegen nowhere", 1, "nowhere"),
    ("dataset synthetic made --count none", 2, "whole number from 1 to 10,000,000"),
    ("schema rows", 2, "argument {grid,results,precisions}: invalid choice: 'rows'"),
    ("completion csh", 2, "choose from"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "code", "hint"), WRONG, ids=[typed for typed, _, _ in WRONG])
def test_wrong_input_says_what_to_do_next(
    typed: str, code: int, hint: str, place: Path, nightgrid: Nightgrid
) -> None:
    (place / "rows.parquet").write_bytes(b"PAR1\x00\x01\xff")
    before = sorted(path.name for path in place.iterdir())
    printed = nightgrid(*shlex.split(typed), code=code)
    assert hint in printed.err
    assert "Traceback" not in printed.err and printed.err.startswith(("nightgrid", "usage:"))
    assert sorted(path.name for path in place.iterdir()) == before


def test_comparing_names_files_that_cannot_be_read(place: Path, nightgrid: Nightgrid) -> None:
    (place / "results" / "two" / "rows" / "0-1.parquet").write_bytes(b"PAR1 cut")
    assert "compare: not read: " in (printed := nightgrid("compare", "one", "two")).err
    assert "0-1.parquet: " in printed.err


READERS = [
    *(["report"], ["status"], ["compare", "one", "two"], ["query", "select 1"]),
    *(["plan", "grid.yaml"], ["run", "grid.yaml", "--in-process"]),
    ["export", "out", "--to", "datasets"],
]
#: Runs each list of arguments, in one process: what it ended with and said, as a line of JSON.
IN_TURN = """\
import contextlib, io, json, sys
from orchestrator.cli.main import main
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    print(json.dumps([code, said.getvalue()]))
"""


@pytest.mark.slow
def test_a_directory_without_permission_is_named(place: Path) -> None:
    (place / "results").chmod(0)
    known = NOTEBOOK_GRID.replace("workload: tiny", "workload: text-generation")
    (place / "grid.yaml").write_text(known.replace("name: tiny-run", "name: one"))
    nobody = 65534
    try:
        done = subprocess.run(
            [sys.executable, "-c", IN_TURN, json.dumps(READERS)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "NIGHTGRID_RESULTS": str(place / "results"), "HOME": str(place)},
            user=nobody if os.getuid() == 0 else None,
        )
    finally:
        (place / "results").chmod(0o755)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for arguments, (code, said) in zip(READERS, answers, strict=True):
        assert code in (2, 4), (arguments, said)
        assert "Traceback" not in said
        assert "ermission" in said or "cannot be read" in said, (arguments, said)
