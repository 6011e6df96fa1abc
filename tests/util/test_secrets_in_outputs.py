"""No secret gets out of a run: not by its rows, its files, its output, its notice or its errors,
whoever met it and wherever a text is cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tiny_workload

from orchestrator.cli.main import main
from orchestrator.core.errors import ClusterError
from orchestrator.core.events import RunAttempt
from orchestrator.driver.local import InProcessExecutor
from orchestrator.driver.loop import Driver
from orchestrator.store.store import Store
from orchestrator.worker.process import tail_of
from orchestrator.worker.protocol import TAIL_BYTES

KEY_LINES = tuple(
    f"{number:02}MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTU" for number in range(60)
)
KEY = "\n".join(["-----BEGIN PRIVATE KEY-----", *KEY_LINES, "-----END PRIVATE KEY-----"])
SECRETS = {
    "WANDB_KEY": "0123456789abcdef0123456789",
    "DB_PASSPHRASE": "open, sesame & close",
    "MYSQL_PWD": "hunter2hunter",
    "GITHUB_PAT": "pat-11ABCDEFG",
    "ALERT_WEBHOOK": "https://hooks.example/T000/B000/xyzzy",
}
ADDRESS = "redis://:swordfish-1@store.example/0 and https://s3.example/x?X-Amz-Signature=c0ffee99"
GRID = """\
name: leaky
experiments:
  - {name: e, workload: tiny, model: tiny-chatglm3, accelerator: CPU, precision: fp32}
"""


def told() -> str:
    """All secrets in one message, one of them across the 500th character, where it is cut."""
    values = [os.environ[name] for name in SECRETS]
    return f"{' '.join(values)} {ADDRESS} ".ljust(490) + f"{os.environ['WANDB_KEY']}\n{KEY}\nend"


def leaks(text: str) -> list[str]:
    """The secrets in a text, and halves of them."""
    values = [*SECRETS.values(), "swordfish-1", "c0ffee99", *KEY_LINES]
    return [value for value in values if value in text or value[:10] in text]


def all_that_is_left(directory: Path) -> str:
    """The rows of the run and every file of it, as text."""
    rows = Store.existing(directory, "leaky").measurements()
    files = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    assert rows and len(files) > 3
    return repr(rows) + "".join(data.decode("utf-8", "replace") for data in files)


@pytest.fixture
def leaky(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A run of one job in this process, whose notice goes to a file."""
    tiny_workload.register(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "grid.yaml").write_text(GRID)
    hook = "sh -c 'cat > notice.json; echo $MYSQL_PWD at redis://:swordfish-1@x; exit 3'"
    return ["run", "grid.yaml", "--in-process", "--results", "results", "--notify", hook]


def raise_it(*_: Any) -> NoReturn:
    raise RuntimeError(told())


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["the workload", "the executor"])
def test_no_secret_of_an_error_gets_out(
    leaky: list[str],
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if broken == "the workload":
        monkeypatch.setattr(tiny_workload, "run", raise_it)
    else:
        perform = InProcessExecutor.perform
        monkeypatch.setattr(
            InProcessExecutor,
            "perform",
            lambda executor, command: (
                raise_it() if isinstance(command, RunAttempt) else perform(executor, command)
            ),
        )
    assert main(leaky) == 10
    output = "".join(capfd.readouterr())
    assert not leaks(output) and "<WANDB_KEY>" in output
    assert "it ended with 3: <MYSQL_PWD> at redis://<credentials>@x" in output
    assert not leaks((tmp_path / "notice.json").read_text())
    left = all_that_is_left(tmp_path / "results")
    assert not leaks(left) and "<WANDB_KEY>" in left


def test_no_secret_of_a_failed_run_gets_out(
    leaky: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(_: Driver) -> NoReturn:
        raise ClusterError(told())

    monkeypatch.setattr(Driver, "drive", fail)
    assert main(leaky) == 3
    for text in ("".join(capfd.readouterr()), (tmp_path / "notice.json").read_text()):
        assert not leaks(text) and "<GITHUB_PAT>" in text


def test_the_end_of_a_log_is_redacted_before_it_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    for filling in range(0, TAIL_BYTES + 200, 97):
        log.write_text(
            f"{'x' * 200}\n" * 400 + f"{KEY}\nat {SECRETS['WANDB_KEY']}\n" + "y" * filling + "\nend"
        )
        tail = tail_of(str(log), SECRETS)
        assert not leaks(tail) and tail.endswith("end") and len(tail) <= TAIL_BYTES
    log.write_text(f"50% {SECRETS['WANDB_KEY']} " * 9000)
    tail = tail_of(str(log), SECRETS)
    assert not leaks(tail) and "50% <WANDB_KEY>" in tail
    assert tail_of(str(tmp_path / "none"), SECRETS) == ""
