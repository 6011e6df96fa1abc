"""No secret of the environment, and no credential in a URL, survives into a row."""

from orchestrator.worker.redaction import redact


def test_values_of_secret_variables_are_replaced_by_their_name() -> None:
    """A token that an error message quotes is named, not shown."""
    text = redact("401 for hf_abcdef123456", {"HF_TOKEN": "hf_abcdef123456"})
    assert text == "401 for <HF_TOKEN>"


def test_a_secret_inside_another_leaves_no_remainder() -> None:
    """The longer secret goes first, so that its rest does not stay behind."""
    environment = {"A_SECRET": "abcdefgh", "B_SECRET": "abcdefghijkl"}
    assert redact("x abcdefghijkl y", environment) == "x <B_SECRET> y"


def test_credentials_in_urls_and_headers_are_removed() -> None:
    """User and password before the host's name go, the host stays."""
    assert redact("https://me:pw123@hub.example/x", {}) == "https://<credentials>@hub.example/x"
    assert "eyJhbGci" not in redact("Authorization: Bearer eyJhbGciOi.x", {})


def test_harmless_text_stays_as_it_is() -> None:
    """Short values, names of files and ordinary variables are no secrets."""
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "/etc/ray/auth",
        "HOME": "/home/me",
        "GIT_AUTHOR_NAME": "Somebody",
    }
    text = "token of Somebody in /etc/ray/auth, /home/me: https://host/a@b"
    assert redact(text, environment) == text
