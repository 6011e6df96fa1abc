"""Whatever a secret is called, looks like, stands in and is cut into, it does not survive, and gets
out of no run: not by its rows, its files, its output, its notice or its errors."""

from __future__ import annotations

import html
import io
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, quote_plus

import pytest
import tiny_workload
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from orchestrator.cli.main import main
from orchestrator.core.errors import ClusterError
from orchestrator.core.events import RunAttempt
from orchestrator.driver.local import InProcessExecutor
from orchestrator.driver.loop import Driver
from orchestrator.store.store import Store
from orchestrator.util.redaction import Redacted, redact, redact_output
from orchestrator.worker.process import tail_of
from orchestrator.worker.protocol import TAIL_BYTES

KINDS = (
    *("KEY", "API_KEY", "TOKEN", "PASSPHRASE", "PWD", "PAT", "WEBHOOK", "WEBHOOK_URL", "SECRET"),
    *("PASSWORD", "CREDENTIALS", "AUTH", "SIGNATURE", "ACCESS_KEY_ID", "PRIVATE_KEY"),
)
names = st.one_of(
    st.builds(
        "{}_{}".format, st.sampled_from(["HF", "GITHUB", "Db", "my"]), st.sampled_from(KINDS)
    ),
    st.sampled_from(["NIGHTGRID_NOTIFY", "PGPASSWORD", "SSHPASS", "githubToken", "SECRET"]),
)
#: With a digit and a sign, so that none of them reads as a word.
values = st.builds(
    "{}{}{}{}".format,
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=4, max_size=20),
    st.sampled_from("0123456789"),
    st.sampled_from("!$&+/=?@#%:;\"'\\é密 "),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=2, max_size=20),
)
base64_line = st.text("ABCDEFabcdef0123456789+/", min_size=64, max_size=64)


@st.composite
def private_keys(draw: st.DrawFn) -> str:
    """A key in PEM form, of one line to fifty."""
    kind = draw(st.sampled_from(["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "]))
    lines = draw(st.lists(base64_line, min_size=1, max_size=8)) * draw(st.integers(1, 6))
    last = draw(st.sampled_from(["", "qrstuv==", "qrstuvwxyzqrstu=", "qrstuvwxyzqrstuvwxyz01"]))
    body = "\n".join([*lines, *([last] if last else [])])
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


def one_line(text: str) -> str:
    return " ".join(text.split())


SPELLINGS: tuple[Callable[[str], str], ...] = (
    str,
    lambda value: json.dumps(value)[1:-1],
    lambda value: json.dumps(value, ensure_ascii=False)[1:-1],
    lambda value: repr(value)[1:-1],
    lambda value: repr(value.encode())[2:-1],
    lambda value: quote(value, safe=""),
    quote,
    quote_plus,
    lambda value: re.sub("%..", lambda code: code[0].lower(), quote(value)),
    html.escape,
)

ORDINARY = (
    "a monkey and its keys, 1 token of 512 tokens",
    "SUCCEEDED     tiny-chatglm3 b1 fp32: 1,204.5 tokens/s ±1.2%",
    "basic functions work, Basic training too; the bearer of news, Bearer authentication",
    "https://host:8080/a@b?max_tokens=512&page=2#top",
    "see http://x.example/z, write to me@x.example",
    "sk-learn, task-force, hf_hub, eyJ",
    "-----BEGIN CERTIFICATE-----",
    "expected a -----BEGIN PRIVATE KEY marker",
    "tokenizer=fast; key=4, sort key: batch_size",
    "\r 50%|#####     | 5/10 [00:01<00:01,  4.96it/s]",
    "RuntimeError: shape '[4, -1]' is invalid for input of size 7",
    'File "/home/me/x.py", line 3, in <module>',
    "\n",
    "\t",
    " ",
    "",
)
ORDINARY_VARIABLES = {
    "MONKEY": "banana-split-77",
    "KEYBOARD": "de-latin1",
    "SORT_KEY": "batch_size",
    "CACHE_KEY": "1",
    "GROUP_KEY": "SUCCEEDED",
    "PARTITION_KEY": "tiny-chatglm",
    "HF_TOKEN": "1",
    "MAX_TOKENS": "512512",
    "TOKENIZERS_PARALLELISM": "false-or-true-1",
    "RAY_AUTH_MODE": "bearer",
    "RAY_AUTH_TOKEN_PATH": "/etc/ray/auth-1",
    "SSH_AUTH_SOCK": "/tmp/agent.77",
    "GIT_AUTHOR_NAME": "Somebody 7",
    "XAUTHORITY": "/home/me/.Xauthority",
    "NIGHTGRID_NOTIFY": "@/home/me/hook",
    "PWD": "/home/me/work-7",
    "OLDPWD": "/home/me/work-6",
    "COMPAT": "level-77",
    "GOOGLE_APPLICATION_CREDENTIALS": "/proc/self/status",
}

words = st.text(
    st.characters(categories=["L", "N", "P", "Zs"], exclude_characters="@=/<-"), max_size=9
)
ordinary_texts = st.lists(st.one_of(st.sampled_from(ORDINARY), words), max_size=8).map(" ".join)
#: Where a stream is cut, and whether it is flushed there.
chunkings = st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=12)


def streamed(text: str, environment: Mapping[str, str], chunking: list[tuple[int, bool]]) -> str:
    """The output of a stream into which ``text`` goes in these chunks."""
    beneath = io.StringIO()
    stream = Redacted(beneath, environment)
    for length, flushed in chunking:
        stream.write(text[:length])
        text = text[length:]
        if flushed:
            stream.flush()
    stream.write(text)
    stream.flush()
    stream.close()
    return beneath.getvalue()


@given(
    secrets=st.dictionaries(names, values, min_size=1, max_size=3),
    parts=st.lists(st.tuples(ordinary_texts, st.integers(0, 9), st.sampled_from(SPELLINGS))),
    chunking=chunkings,
)
@example(
    secrets={"GITHUB_PAT": "ghp-12345!x"},
    parts=[("at ", 0, str)],
    chunking=[(5, True), (2, False), (3, True)],
)
@example(secrets={"HF_KEY": "00000!00"}, parts=[("", 0, str)], chunking=[])  # ends as it begins
def test_no_secret_of_the_environment_survives(
    secrets: dict[str, str],
    parts: list[tuple[str, int, Callable[[str], str]]],
    chunking: list[tuple[int, bool]],
) -> None:
    known = list(secrets.values())
    assume(not any(value.startswith("@") for value in known))
    text = "".join(before + spell(known[which % len(known)]) for before, which, spell in parts)
    for shown in (redact(text, secrets), streamed(text, secrets, chunking)):
        for value in known:
            for spell in SPELLINGS:
                assert spell(value) not in shown


@pytest.mark.slow
@settings(max_examples=25)  # of each spelling
@given(key=private_keys(), before=ordinary_texts, chunking=chunkings, named=st.booleans())
@pytest.mark.parametrize("spell", [str, SPELLINGS[1], SPELLINGS[5], one_line])
def test_no_private_key_survives(
    spell: Callable[[str], str],
    key: str,
    before: str,
    chunking: list[tuple[int, bool]],
    named: bool,
) -> None:
    assume(named or spell is not SPELLINGS[5])  # nobody quotes a key that is no parameter
    environment = {"TLS_PRIVATE_KEY": key} if named else {}
    text = f"{before}\n{spell(key)}\nafterwards all is well"
    for shown in (redact(text, environment), streamed(text, environment, chunking)):
        for line in key.splitlines()[1:-1]:
            assert line not in shown and quote(line) not in shown
        assert shown.endswith("afterwards all is well")


@given(key=private_keys(), cut=st.integers(0, 4000), front=st.booleans())
def test_a_piece_of_a_private_key_is_none_the_less(key: str, cut: int, front: bool) -> None:
    cut %= len(key)
    text = key[:cut] if front else key[cut:]
    shown = redact(text, {})
    marker = "PRIVATE KEY-----"
    if text.count(marker) == 1 and (front or text.index(marker) > 30):
        whole = [line for line in text.splitlines() if len(line) == 64]
        assert not [line for line in whole if line in shown]


@given(text=ordinary_texts, chunking=chunkings)
def test_no_ordinary_text_changes(text: str, chunking: list[tuple[int, bool]]) -> None:
    assert redact(text, ORDINARY_VARIABLES) == text
    assert streamed(text, ORDINARY_VARIABLES, chunking) == text


@pytest.mark.parametrize("name", ["TOKEN", "KEY"])
@pytest.mark.parametrize("value", [v for v in ORDINARY_VARIABLES.values() if len(v) < 6])
def test_short_values_are_words(name: str, value: str) -> None:
    """Taking "1" out of a log would garble it."""
    text = f"{value} {value}x"
    assert redact(text, {f"SOME_{name}": value}) == text


credentials = st.text("abcdefXYZ0123456789.~!$*-_%", min_size=1, max_size=30)


@given(
    scheme=st.sampled_from(["redis", "https", "postgresql+psycopg2", "s3", "amqp"]),
    user=st.one_of(st.just(""), st.text("abc", min_size=1)),
    password=credentials,
    name=st.sampled_from(
        [
            *("token", "access_token", "X-Amz-Signature", "X-Amz-Credential", "sig", "apikey"),
            *("X-Amz-Security-Token", "X-Goog-Signature", "api_key", "key", "client_secret"),
        ]
    ),
    mark=st.sampled_from("?&#"),
    chunking=chunkings,
)
def test_no_credential_in_an_address_survives(
    scheme: str, user: str, password: str, name: str, mark: str, chunking: list[tuple[int, bool]]
) -> None:
    assume(password not in "credentials")
    text = (
        f"at {scheme}://{user}:Qq{password}@host.example/p?a=1{mark}{name}=Zz{password}&b=2 failed"
    )
    for shown in (redact(text, {}), streamed(text, {}, chunking)):
        assert f"Qq{password}" not in shown and f"Zz{password}" not in shown
        assert "@host.example/p?a=1" in shown and shown.endswith(" failed")


@given(token=st.text("abcXYZ0123456789._~+/-", min_size=12, max_size=40), chunking=chunkings)
@pytest.mark.parametrize(
    "form", ["Authorization: Bearer 1{}", '{{"authorization": "token 1{}"}}', "sent Bearer 1{} to"]
)
def test_no_credential_in_a_header_survives(
    form: str, token: str, chunking: list[tuple[int, bool]]
) -> None:
    text = form.format(token)
    assert token not in redact(text, {})
    assert token not in streamed(text, {}, chunking)


def test_a_password_is_struck_where_it_stands_alone() -> None:
    environment = {"DATABASE_URL": "postgres://me:hunter2hunter@db/x"}
    assert redact("bad password 'hunter2hunter'", environment) == "bad password '<DATABASE_URL>'"


def test_a_secret_inside_another_leaves_no_remainder_and_hosts_stay() -> None:
    environment = {"A_SECRET": "abcdefgh", "B_SECRET": "abcdefghijkl"}
    assert redact("x abcdefghijkl y", environment) == "x <B_SECRET> y"
    assert redact("https://me:pw123@hub.example/x", {}) == "https://<credentials>@hub.example/x"


@pytest.mark.parametrize(
    "text",
    [
        "Basic QUJD1EVG",
        "Bearer 1234567a",
        "xoxb-0123456789",
        "Authorization: a1b2c3",
        "AKIA0123456789ABCDEF",
        "hf_01234567890123456789",
    ],
)
def test_the_shortest_credentials_are_removed(text: str) -> None:
    assert "<credentials>" in redact(text, {})


def test_what_python_prints_has_no_secrets(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    redact_output({"HF_TOKEN": "hf_abcdef123456"})
    print("token hf_abcdef123456", flush=True)
    print("error hf_abcdef123456", file=sys.stderr, flush=True)
    assert sys.stderr.fileno() == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("token <HF_TOKEN>\n", "error <HF_TOKEN>\n")


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
