"""Access to the watch page: tokens beyond loopback, and no stranger's page on it."""

from __future__ import annotations

import pytest

from orchestrator.watch.server import Access, Verdict, host_of, is_loopback

OPEN = Access(port=8600, token=None)
CLOSED = Access(port=8600, token="right-token")


@pytest.mark.parametrize(
    "host",
    ["localhost:8600", "127.0.0.1:8600", "127.0.0.1", "[::1]:9000", "LOCALHOST", "a.localhost:1"],
)
def test_on_loopback_its_own_names_are_let_in(host: str) -> None:
    """With any port, since a tunnel may end at another one."""
    assert OPEN.verdict({"Host": host}, "") is Verdict.ALLOWED


@pytest.mark.parametrize(
    "host",
    ["evil.example:8600", "127.0.0.1.evil.example", "localhost.evil.example", "", "10.0.0.7:8600"],
)
def test_on_loopback_a_foreign_name_that_points_here_is_refused(host: str) -> None:
    """A stranger's page can make his name resolve to 127.0.0.1, but not change the header."""
    assert OPEN.verdict({"Host": host}, "") is Verdict.WRONG_HOST


@pytest.mark.parametrize(
    ("headers", "query", "verdict"),
    [
        ({}, "", Verdict.NO_TOKEN),
        ({}, "token=", Verdict.NO_TOKEN),
        ({}, "token=wrong", Verdict.NO_TOKEN),
        ({}, "token=right-tokenx", Verdict.NO_TOKEN),
        ({}, "token=right-token", Verdict.SIGNED_IN),
        ({"Cookie": "nightgrid-watch-8600=right-token"}, "", Verdict.ALLOWED),
        ({"Cookie": "nightgrid-watch-8600=wrong"}, "", Verdict.NO_TOKEN),
        ({"Cookie": "nightgrid-watch-8601=right-token"}, "", Verdict.NO_TOKEN),
        ({"Cookie": "a\x01=;;="}, "", Verdict.NO_TOKEN),
        ({"Authorization": "Bearer right-token"}, "", Verdict.ALLOWED),
        ({"Authorization": "Basic right-token"}, "", Verdict.NO_TOKEN),
        ({"Authorization": "Bearer \u00e9\udc80"}, "", Verdict.NO_TOKEN),
        ({"Host": "127.0.0.1"}, "", Verdict.NO_TOKEN),
    ],
)
def test_with_a_token_only_the_token_lets_in(
    headers: dict[str, str], query: str, verdict: Verdict
) -> None:
    assert CLOSED.verdict(headers, query) is verdict


def test_the_name_of_a_host_header_is_found_without_its_port() -> None:
    assert [host_of(text) for text in ("a:1", "a", "[::1]:2", "[fe80::1]")] == [
        "a",
        "a",
        "::1",
        "fe80::1",
    ]
    assert not is_loopback("0.0.0.0") and not is_loopback("192.168.0.1")
