"""The supervisor with real child processes: deaths, signals, exit codes, the terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import started
from hypothesis import given
from hypothesis import strategies as st
from measurements import row
from patience import alive, until

from orchestrator.driver.supervisor import (
    FRUITLESS,
    LONGEST_PAUSE_S,
    MOST,
    Decision,
    DriverEnd,
    decide,
    report_death,
)
from orchestrator.store.store import Store

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
#: Fails what waits for something that does not come; a busy machine needs a fraction of it.
MOST_S = 60.0

RUNNER = """
import json, sys
from orchestrator.driver import supervisor
supervisor.FIRST_PAUSE_S, supervisor.FRUITLESS = 0.01, 3
supervisor._ASK_HEAD_S = 0.05
supervisor.KILL_AFTER_S = 0.2
place, here = sys.argv[1:3]
report = [sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write(input() + chr(10))"]
watch = supervisor.Supervisor(
    command=[sys.executable, here + "/supervised_driver.py", place],
    notify=["tee notice"],
    ends_at=json.loads(sys.argv[3]),
    report_command=[*report, place + "/told.jsonl"],
)
sys.exit(watch.run())
"""


class Supervised:
    """A supervisor in a process of its own, and what its drivers left."""

    def __init__(self, place: Path, *script: str, ends_at: float | None = None, **options: Any):
        self.place = place
        (place / "script").write_text("\n".join(script))
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(place), str(HERE), json.dumps(ends_at)],
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"},
            start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options,
        )

    @property
    def lives(self) -> list[dict[str, Any]]:
        return _lines(self.place / "lives.jsonl")

    @property
    def told(self) -> list[dict[str, Any]]:
        return _lines(self.place / "told.jsonl")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=MOST_S)
        return self.process.returncode, out, err

    def wait_for(self, name: str) -> None:
        assert until((self.place / name).exists, MOST_S)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(*script: str, **options: Any) -> Supervised:
        started.append(Supervised(tmp_path, *script, **options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()


# ---------------------------------------------------------------- exit codes and deaths


@pytest.mark.parametrize("code", [0, 130])
def test_an_exit_code_is_passed_through(supervised: Callable[..., Supervised], code: int) -> None:
    run = supervised(f"drives say:hello end:{code}")
    assert run.end() == (code, "hello\n", "")
    assert len(run.lives) == 1 and run.told == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("die:9", "killed by SIGKILL"),
        ("vanish:10", "ended with 10 without a word"),
        ("again:gone", "gave up: gone"),
    ],
)
def test_a_driver_that_dies_is_reported_and_followed(
    supervised: Callable[..., Supervised], death: str, words: str
) -> None:
    run = supervised(f"drives row {death}", "drives row end:10", ends_at=time.time() + 600)
    code, _, err = run.end()
    assert code == 10 and words in err and "goes on with the run" in err
    assert [life["life"] for life in run.lives] == [1, 2]
    assert run.lives[0]["ends_at"] == run.lives[1]["ends_at"]
    assert run.lives[1]["cards"] == {"HPU": 8}
    assert [life["succeeded"] for life in run.lives] == [False, True]
    (told,) = run.told
    assert told["ending"] == "interrupted" and words in told["reason"]
    assert (told["run"], told["notify"]) == ("night", ["tee notice"])


def test_what_keeps_dying_is_given_up_and_told_so(supervised: Callable[..., Supervised]) -> None:
    run = supervised(*["drives vanish:1"] * 9)
    code, _, err = run.end()
    assert code == 3 and "The same command resumes the run" in err
    assert len(run.lives) == 3
    assert [told["ending"] for told in run.told] == ["interrupted", "failed"]


@pytest.fixture
def headless(
    supervised: Callable[..., Supervised],
) -> Iterator[tuple[Supervised, socket.socket]]:
    """A supervisor that waits for its cluster's head, and the socket at which one may listen."""
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        port = head.getsockname()[1]
        run = supervised(f"drives:127.0.0.1/{port} row vanish:1", "drives end:0")
        assert run.process.stderr is not None
        while f"nothing answers at 127.0.0.1:{port}" not in run.process.stderr.readline():
            assert run.process.poll() is None
        yield run, head


def test_the_next_driver_waits_for_the_head(headless: tuple[Supervised, socket.socket]) -> None:
    run, head = headless
    time.sleep(0.3)
    assert len(run.lives) == 1
    head.listen()
    assert run.process.wait(MOST_S) == 0
    assert len(run.lives) == 2


def test_a_head_that_stays_away_is_not_waited_for_against_ones_will(
    headless: tuple[Supervised, socket.socket],
) -> None:
    run, _ = headless
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 130 and "an end was asked for while the cluster's head was away" in err
    assert [told["ending"] for told in run.told] == ["interrupted", "stopped"]


def test_what_a_driver_left_running_is_not_waited_for(
    supervised: Callable[..., Supervised],
) -> None:
    run = supervised("drives row leave:300 die:9", "end:0")
    try:
        assert run.process.wait(MOST_S) == 0
        assert len(run.lives) == 2
    finally:
        os.kill(int((run.place / "left").read_text()), signal.SIGKILL)


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("whom", ["supervisor", "group"])
def test_each_signal_reaches_the_driver_once(
    supervised: Callable[..., Supervised], whom: str
) -> None:
    run = supervised("drives until:3 end:130")
    run.wait_for("waits")
    send = os.kill if whom == "supervisor" else os.killpg
    for count, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGINT)):
        send(run.process.pid, number)
        time.sleep(0.1 * (count < 2))
    assert run.end()[0] == 130
    assert (run.place / "signals").read_text() == "SIGINT SIGTERM SIGINT"
    assert run.told == []


def test_a_driver_that_ignores_the_third_signal_is_killed(
    supervised: Callable[..., Supervised],
) -> None:
    """One that hangs in C++ runs no handler."""
    run = supervised("drives until:99")
    run.wait_for("waits")
    for _ in range(3):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert run.end()[0] == 130
    assert not alive(run.lives[0]["pid"]) and len(run.lives) == 1


def test_a_driver_that_dies_while_it_was_to_end_is_reported(
    supervised: Callable[..., Supervised],
) -> None:
    run = supervised("drives row until:1 die:9")
    run.wait_for("waits")
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 137 and "an end was asked for" in err
    assert [told["ending"] for told in run.told] == ["failed"] and len(run.lives) == 1


def test_the_driver_dies_with_its_supervisor(supervised: Callable[..., Supervised]) -> None:
    run = supervised("drives until:99")
    run.wait_for("waits")
    run.process.kill()
    run.end()
    assert until(lambda: not alive(run.lives[0]["pid"]), MOST_S)


def test_both_stop_and_go_on_together(supervised: Callable[..., Supervised]) -> None:
    run = supervised("drives until:1 end:0")
    run.wait_for("waits")

    def states() -> set[str]:
        pids = (run.process.pid, run.lives[0]["pid"])
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

    run.process.send_signal(signal.SIGTSTP)
    assert until(lambda: states() == {"T"}, MOST_S)
    run.process.send_signal(signal.SIGCONT)
    assert until(lambda: "T" not in states(), MOST_S)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 0


def test_ctrl_c_in_a_terminal_reaches_the_driver_once(
    supervised: Callable[..., Supervised],
) -> None:
    """The terminal stops who writes to it in the background, but for the driver."""
    master, slave = pty.openpty()
    subprocess.run(["stty", "tostop"], stdin=slave, check=True)

    def own_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    run = supervised(
        "drives until:1 say:bye end:10",
        stdin=slave,
        stdout=slave,
        stderr=slave,
        text=False,
        preexec_fn=own_terminal,
    )
    os.close(slave)
    run.wait_for("waits")
    os.write(master, b"\x03")
    assert run.process.wait(MOST_S) == 10
    printed = os.read(master, 10_000)
    os.close(master)
    assert b"bye" in printed
    assert (run.place / "signals").read_text() == "SIGINT"


def test_a_driver_without_a_package_is_not_started_again(tmp_path: Path) -> None:
    absent = "import sys\nsys.modules['pyarrow'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(absent)
    words = ("run", str(ROOT / "grids/smoke.yaml"), "--emulate", "1x1")
    process = started(*words, cwd=tmp_path)
    printed, _ = process.communicate(timeout=MOST_S)
    assert printed == "nightgrid run: this needs the package pyarrow: pip install pyarrow\n"
    assert process.returncode == 7


def test_the_supervisor_is_small() -> None:
    """It waits all night beside benchmarks."""
    code = (
        "import sys\nimport orchestrator.cli.run, orchestrator.driver.supervisor\n"
        "large = ('ray', 'torch', 'transformers', 'pyarrow', 'pydantic', 'numpy', 'rich', 'yaml')\n"
        "sys.exit(', '.join(name for name in large if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- restart policy

NOW = 1_700_000_000.0
DONE = DriverEnd(returncode=10, reported=True, drove=True, wrote_rows=True)
KILLED = DriverEnd(returncode=-9, reported=False, drove=True, wrote_rows=True)
IDLE = DriverEnd(returncode=1, reported=False, drove=True)
NO_HEAD = DriverEnd(returncode=3, reported=True)
LOST = DriverEnd(
    returncode=3, reported=True, drove=True, restart_reason="the control store is gone"
)


AGAIN = Decision(pause_s=2.0)
CRASHED = DriverEnd(returncode=-11, reported=False)
ASKED = DriverEnd(returncode=-15, reported=False)
BELIEVED = [DriverEnd(returncode=code, reported=True, drove=True) for code in (0, 1, 2, 10, 130)]
USELESS = "{} drivers in a row ended so without writing one row"
TOO_LATE = "the deadline is too near for another one"


def answer(*lives: DriverEnd, stops: int = 0, ends_at: float | None = None) -> Decision:
    return decide(lives, stops=stops, now=NOW, ends_at=ends_at)


@pytest.mark.parametrize(
    ("lives", "more", "decision"),
    [
        *(([life], {}, Decision(life.returncode)) for life in BELIEVED),
        *(([KILLED, life], {}, Decision(life.returncode)) for life in BELIEVED),
        *(([life], {}, AGAIN) for life in (KILLED, IDLE, LOST)),
        ([NO_HEAD], {}, Decision(3)),
        ([KILLED, NO_HEAD], {}, AGAIN),  # what was accepted once: the cluster is not back yet
        ([KILLED, IDLE, IDLE, KILLED], {}, AGAIN),  # rows were written again: no longer pause
        ([CRASHED], {}, AGAIN),
        ([CRASHED] * 2, {}, Decision(139, USELESS.format(2))),  # no cluster would help
        ([IDLE] * FRUITLESS, {}, Decision(3, USELESS.format(FRUITLESS))),
        ([KILLED] * MOST, {}, AGAIN),
        (
            [KILLED] * (MOST + 1),
            {},
            Decision(137, f"{MOST} drivers were started again, the most that a run gets"),
        ),
        ([KILLED], {"ends_at": NOW + 59}, Decision(137, TOO_LATE)),
        ([KILLED], {"ends_at": NOW + 61}, AGAIN),
        ([KILLED], {"stops": 1}, Decision(137, "an end was asked for")),
        ([ASKED], {"stops": 1}, Decision(-15)),
        ([KILLED], {"stops": 3}, Decision(130)),
        ([DONE], {"stops": 2}, Decision(10)),
    ],
)
def test_the_end_of_a_driver_is_followed_by(
    lives: list[DriverEnd], more: dict[str, Any], decision: Decision
) -> None:
    assert answer(*lives, **more) == decision


def test_pauses_grow_until_rows_are_written_again() -> None:
    seconds = [answer(*[KILLED] + [IDLE] * n).pause_s for n in range(FRUITLESS)]
    assert seconds == [2.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, LONGEST_PAUSE_S]


@given(
    lives=st.lists(st.sampled_from([KILLED, IDLE, NO_HEAD, LOST]), min_size=1, max_size=MOST + 20),
    stops=st.integers(0, 4),
)
def test_the_policy_always_ends(lives: list[DriverEnd], stops: int) -> None:
    number = 0
    for number in range(1, len(lives) + 1):
        decision = answer(*lives[:number], stops=stops)
        if decision.pause_s is None:
            break
        assert 0 < decision.pause_s <= LONGEST_PAUSE_S
        assert stops == 0
    assert number <= MOST + 1


# ---------------------------------------------------------------- after a driver's death


def order(place: Path, **changes: Any) -> dict[str, Any]:
    return {
        "run": "night",
        "results": str(place / "results"),
        "notify": [f"tee {place / 'notice.json'}"],
        "ending": "interrupted",
        "reason": "the driver was killed by SIGKILL; it is started again",
        "exit_code": 137,
    } | changes


def test_what_was_measured_is_reported_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Store(tmp_path / "results", "night") as store:
        store.append(row(0), row(1))
    page = store.path / "report.html"
    report_death(order(tmp_path, notify=["@/nowhere"]))
    assert "cannot notify anyone" in capfd.readouterr().err and page.exists()
    report_death(order(tmp_path))
    assert "notified the command tee" in capfd.readouterr().err
    assert "night" in page.read_text()
    notice = json.loads((tmp_path / "notice.json").read_text())
    assert (notice["state"], notice["exit_code"], notice["jobs"]) == ("interrupted", 137, 2)
    assert notice["report"] == str(page)
    assert "was interrupted" in notice["text"] and "killed by SIGKILL" in notice["text"]


def test_who_asked_is_told_even_if_nothing_was_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.driver.supervisor"],
        input=json.dumps(order(tmp_path, ending="failed")),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    notice = json.loads((tmp_path / "notice.json").read_text())
    assert (notice["state"], notice["jobs"], notice["report"]) == ("failed", 0, "")
    assert not (tmp_path / "results").exists()
