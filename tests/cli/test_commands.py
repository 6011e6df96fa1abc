"""Traits of all commands: help that teaches, JSON for scripts, one table of exit codes,
errors that say what to do next. A new command has to take its place in these tables."""

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
import tiny_workload
from example_grids import NOTEBOOK_GRID
from measurements import row

from orchestrator.cli.main import COMMANDS, EPILOG, full_parser, main, parsed
from orchestrator.core import errors
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.core.status import RunStatus
from orchestrator.on_ray.jobs import JobInfo, Submission
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


#: Commands whose JSON needs a cluster to ask, and where it is tried.
TRIED_ELSEWHERE = {
    "doctor": "tests/ray",
    "describe": "tests/workloads/models/test_describe.py",
    "verify": "tests/cli/test_verify_command.py",
    "stop": "tests/cli/test_runs_here_and_there.py",
    "fetch": "tests/ray",
}


def has(*names: str) -> Callable[[Any], None]:
    """Return whether the printed object has these keys, among others."""

    def check(printed: Any) -> None:
        assert set(names) <= set(printed), set(names) - set(printed)

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
        ["grid.yaml", "--address", "http://head:8265"],
        has("submission_id", "sent", "address", "run", "entrypoint"),
    ),
    "status": (["one"], has("run", "rows", "final_rows", "age_s", "status")),
    "runs": ([], lambda printed: has(*names_of(RunEntry))(printed[0])),
    "report": (["one"], rows_have_the_fields_of_the_record),
    "compare": (["one", "two"], has("before", "after", "changes", "refused")),
    "query": (["select * from jobs"], lambda printed: has("job_id", "throughput")(printed[0])),
    "export": (["out", "--to", "datasets"], has("destination", "written")),
    "convert": (["checkpoint", "converted"], has("path", "parameters", "bytes", "weight_files")),
    "protect": (
        ["model", "sealed", "--key-file", "key", "--new-key"],
        has("path", "protected", "bytes", "took_s"),
    ),
    "dataset": (["synthetic", "made", "--count", "4"], has("directory", "counts", "synthetic")),
    "schema": (["precisions"], lambda printed: has("precision", "device", "text")(printed[0])),
}


class JobServerStandIn:
    """A cluster's job server as the commands use it, with one job."""

    def __init__(self, address: str | None) -> None:
        self.address = address or "http://head:8265"

    def submit(self, submission: Submission) -> bool:
        """Take the job."""
        return True

    def jobs(self) -> list[JobInfo]:
        """One that is over."""
        return [
            JobInfo(
                submission_id="night",
                status="SUCCEEDED",
                entrypoint="python -m orchestrator run grid.yaml",
                message="",
                started_at=1000.0,
                ended_at=1010.0,
                exit_code=0,
            )
        ]

    def sent(self, run: str) -> JobInfo:
        """That one."""
        return self.jobs()[0]

    def ask(self, arguments: list[str], *, timeout_s: float) -> str:
        """Nothing is left of the run."""
        return "nightgrid status: there is no run 'night' in results."


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a grid, two runs and a checkpoint."""
    tiny_workload.register(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("NIGHTGRID_RESULTS", raising=False)
    monkeypatch.setattr("orchestrator.on_ray.jobs.JobServer", JobServerStandIn)
    (tmp_path / "grid.yaml").write_text(NOTEBOOK_GRID)
    for run in ("one", "two"):
        with Store.open(tmp_path / "results", run) as store:
            store.append(row(0, run=run))
    return tmp_path


def options_of(command: str) -> set[str]:
    """Every option of a command, those of its kinds included."""
    parser = full_parser()
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    found: set[str] = set()
    parsers = [commands.choices[command]]
    for one in parsers:
        for action in one._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_or_a_reason_not_to(command: str) -> None:
    places = [table for table in (JSON, WITHOUT_JSON, TRIED_ELSEWHERE) if command in table]
    assert len(places) == 1
    assert ("--json" in options_of(command)) == (command not in WITHOUT_JSON)


@pytest.mark.slow
@pytest.mark.parametrize("command", JSON)
def test_json_is_all_of_standard_output(
    command: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    arguments, check = JSON[command]
    if command == "convert":
        pytest.importorskip("torch")
        from chatglm3_reference import random_state, write_checkpoint

        write_checkpoint(place / "checkpoint", random_state())
    if command == "protect":
        pytest.importorskip("cryptography")
        (place / "model").mkdir()
        for name in ("config.json", "model.safetensors"):
            (place / "model" / name).write_text("{}")
    if command == "query":
        pytest.importorskip("duckdb")
    assert main([command, *arguments, "--json"]) == 0
    check(json.loads(capsys.readouterr().out))


def test_status_json_of_a_submitted_job(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--address", "http://head:8265", "--json"]
    assert main(["status", "night", *at]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one.pop("run_status") is None and set(one) == names_of(JobInfo)
    assert main(["status", *at]) == 0
    assert json.loads(capsys.readouterr().out) == [one]


def test_status_json_has_the_fields_of_the_status(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "grid.yaml", "--in-process", "--quiet"])
    capsys.readouterr()
    assert main(["status", "tiny-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["status"]) == names_of(RunStatus)
    assert told["status"]["finished"] and told["final_rows"] == 2


def test_run_with_json_says_its_progress_elsewhere(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "grid.yaml").write_text(
        NOTEBOOK_GRID.replace("batch_size: 1..2", "trouble: [missing]")
    )
    assert main(["run", "grid.yaml", "--in-process", "--json"]) == errors.JOBS_FAILED
    printed = capsys.readouterr()
    assert json.loads(printed.out)["counts"] == {"FAILED": 1}
    assert "Run tiny-run" in printed.err and "no dataset 'nix'" in printed.err


def test_every_code_is_in_the_table() -> None:
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


@pytest.mark.parametrize("command", ["--help", *COMMANDS])
def test_codes_of_help_texts_are_in_the_table(command: str) -> None:
    help_text = full_parser().format_help()
    if command in COMMANDS:
        (commands,) = [
            a for a in full_parser()._actions if isinstance(a, argparse._SubParsersAction)
        ]
        help_text = commands.choices[command].format_help()
    _, found, said = help_text.partition("exit codes:")
    codes = {int(code) for code in re.findall(r"(?:^|;)\s*(\d+)\s", said, re.MULTILINE)}
    assert codes <= set(errors.MEANINGS)
    assert bool(codes) == bool(found)


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    for code, meaning in errors.MEANINGS.items():
        assert f"| {code} | {meaning} |" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(command: str) -> None:
    (commands,) = [a for a in full_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    epilog = commands.choices[command].epilog or ""
    assert f"nightgrid {command}" in epilog


@pytest.mark.parametrize("command", ["--help", *COMMANDS])
def test_every_example_of_a_help_text_is_a_command_line_that_is_taken(command: str) -> None:
    text = EPILOG
    if command in COMMANDS:
        (commands,) = [
            a for a in full_parser()._actions if isinstance(a, argparse._SubParsersAction)
        ]
        text = commands.choices[command].epilog or ""
    examples = re.findall(r"^  (nightgrid .+?)(?:  .*)?$", text, re.MULTILINE)
    assert examples
    for example in examples:
        command_line = re.split(r" [|>] |  then ", example)[0]
        asked = parsed(shlex.split(command_line)[1:])
        assert asked.command in COMMANDS


def test_submit_hands_on_what_follows_two_dashes() -> None:
    asked = parsed(
        ["submit", "g.yaml", "--address", "http://h", "--", "--retry-failed", "--run=--"]
    )
    assert asked.address == "http://h" and asked.handed_on == ("--retry-failed", "--run=--")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documentation_names_every_command(command: str) -> None:
    assert f"| `{command}` |" in (ROOT / "docs" / "cli.md").read_text()


def test_no_command_at_all_is_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "a first evening:" in capsys.readouterr().err


#: What is typed, the exit code, and the part of the message that says what to do next.
WRONG: list[tuple[list[str], int, str]] = [
    (["plan", "nothing.yaml"], 2, "No such file or directory"),
    (
        ["plan", "."],
        2,
        "not an ordinary file\n    grids that come with Nightgrid: chatglm3-finetune, ",
    ),
    (["plan", "grid.yaml", "--adress", "x"], 2, "plan: error: unrecognized arguments: --adress x"),
    (["schema", "rows"], 2, "argument {grid,results,precisions}: invalid choice: 'rows'"),
    (["plan", "rows.parquet"], 2, "nothing was started"),
    (["plan", "grid.yaml", "--emulate", "2by8"], 2, "2x8"),
    (["plan", "grid.yaml", "--emulate", "99999x8"], 2, "799,992 cards; more than 4096 cards"),
    (["reprot", "smoke"], 2, "there is no command 'reprot'; did you mean report?"),
    (["benchmark"], 2, "`nightgrid --help` lists them"),
    (["simulate", "grid.yaml", "--faults", "2"], 2, "not a number from 0 to 1"),
    (["run", "grid.yaml"], 3, "give --emulate 2x8"),
    (["run", "grid.yaml", "--in-process", "--card-memory", "big"], 2, "such as 2 or 0.5"),
    (["run", "grid.yaml", "--in-process", "--run", "../x"], 4, "../x"),
    (["submit", "nothing.yaml", "--address", "http://h:8265"], 2, "No such file"),
    (["status", "nix"], 4, "Newest first:"),
    (["status", "--results", "nowhere"], 4, "nightgrid run GRID"),
    (["report", "nix"], 4, "Newest first:"),
    (["report", "--results", "nowhere"], 4, "--results DIR or NIGHTGRID_RESULTS"),
    (["report", "one", "--output", "grid.yaml/x", "--format", "md"], 4, "cannot write"),
    (["report", "one", "--format", "pdf"], 2, "choose from"),
    (["watch", "nix"], 4, "Newest first:"),
    (["watch", "--port", "99999999"], 2, "99999999"),
    (["compare", "one", "nix"], 4, "Newest first:"),
    (["compare", "one", "two", "--fail-on-regression", "five"], 2, "such as 5%"),
    (["compare", "one", "two", "--allow", "speed"], 6, "can be allowed"),
    (["query", "drop everything"], 2, "nightgrid schema results"),
    (["query", "select 1", "--results", "nowhere"], 4, "nightgrid run GRID"),
    (["export", "grid.yaml", "--to", "datasets"], 4, "grid.yaml"),
    (["describe", "no-such-model"], 1, "tiny-chatglm3"),
    (["describe", "tiny-chatglm3", "--lora-rank", "0"], 2, "whole number from 1"),
    (["convert", "nowhere", "out"], 1, "nowhere"),
    (["protect", "nowhere", "out", "--key-file", "missing"], 1, "the key file missing cannot be"),
    (["dataset", "advertisegen", "nowhere"], 1, "nowhere"),
    (["dataset", "synthetic", "made", "--count", "none"], 2, "whole number from 1 to 10,000,000"),
    (["schema", "everything"], 2, "choose from"),
    (["completion", "csh"], 2, "choose from"),
    (["repotr"], 2, "did you mean report?"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "hint"), WRONG, ids=[" ".join(typed) for typed, _, _ in WRONG]
)
def test_wrong_input_says_what_to_do_next(
    arguments: list[str], code: int, hint: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "rows.parquet").write_bytes(b"PAR1\x00\x01\xff")
    before = sorted(path.name for path in place.iterdir())
    try:
        got = main(arguments)
    except SystemExit as refused:  # argparse
        got = int(refused.code or 0)
    printed = capsys.readouterr()
    assert got == code, printed.err
    assert hint in printed.err
    assert "Traceback" not in printed.err and printed.err.startswith(("nightgrid", "usage:"))
    assert sorted(path.name for path in place.iterdir()) == before


READERS = [
    ["report"],
    ["status"],
    ["compare", "one", "two"],
    ["query", "select 1"],
    ["plan", "grid.yaml"],
    ["run", "grid.yaml", "--in-process"],
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
