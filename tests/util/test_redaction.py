"""No secret of the environment, and no credential in a URL, survives into a row."""

import io
import sys

import pytest

from orchestrator.util.redaction import Redacted, redact, redact_output


def test_values_of_secret_variables_are_replaced_by_their_name() -> None:
    text = redact("401 for hf_abcdef123456", {"HF_TOKEN": "hf_abcdef123456"})
    assert text == "401 for <HF_TOKEN>"


def test_a_secret_inside_another_leaves_no_remainder() -> None:
    environment = {"A_SECRET": "abcdefgh", "B_SECRET": "abcdefghijkl"}
    assert redact("x abcdefghijkl y", environment) == "x <B_SECRET> y"


def test_credentials_in_urls_and_headers_are_removed() -> None:
    assert redact("https://me:pw123@hub.example/x", {}) == "https://<credentials>@hub.example/x"
    assert "eyJhbGci" not in redact("Authorization: Bearer eyJhbGciOi.x", {})


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


def test_harmless_text_stays_as_it_is() -> None:
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "/etc/ray/auth",
        "HOME": "/home/me",
        "GIT_AUTHOR_NAME": "Somebody",
    }
    text = "token of Somebody in /etc/ray/auth, /home/me: https://host/a@b"
    assert redact(text, environment) == text


SECRET = {"HF_TOKEN": "hf_abcdef123456"}


@pytest.mark.parametrize("cut", range(1, 20, 3))
def test_a_secret_that_is_printed_in_parts_is_no_less_one(cut: int) -> None:
    line = "with hf_abcdef123456 in it\n"
    log = io.StringIO()
    out = Redacted(log, SECRET)
    out.write(line[:cut])
    out.write(line[cut:] + "and more")
    assert log.getvalue() == "with <HF_TOKEN> in it\n"
    out.flush()
    assert log.getvalue().endswith("and more")


def test_what_python_prints_has_no_secrets(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    redact_output(SECRET)
    print("token hf_abcdef123456", flush=True)
    print("error hf_abcdef123456", file=sys.stderr, flush=True)
    assert sys.stderr.fileno() == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("token <HF_TOKEN>\n", "error <HF_TOKEN>\n")
