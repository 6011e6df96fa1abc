"""Access to the page: decisions on the headers of a request, without any I/O.

On loopback whoever is logged in on this machine may, but no web page of a stranger: a name of his
that he points at 127.0.0.1 (DNS rebinding) arrives in the ``Host`` header, and only loopback's own
names are let in. Beyond loopback a token is asked for, once in the address, then as a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

#: Name of the token's parameter in an address.
TOKEN = "token"


class Verdict(Enum):
    """Decision on a request."""

    ALLOWED = "allowed"
    SIGNED_IN = "signed in"  # the token came in the address: keep it in a cookie instead
    NO_TOKEN = "no token"
    WRONG_HOST = "wrong host"


@dataclass(frozen=True, slots=True)
class Access:
    """The rule for one server. ``token`` is None where loopback protects it."""

    port: int
    token: str | None

    @property
    def cookie_name(self) -> str:
        """Cookies are shared by all ports of a host, so each server has its own name."""
        return f"nightgrid-watch-{self.port}"

    def verdict(self, headers: Mapping[str, str], query: str) -> Verdict:
        """Decide on a request by its headers and the query part of its address."""
        if self.token is None:
            host = is_loopback(host_of(headers.get("Host", "")))
            return Verdict.ALLOWED if host else Verdict.WRONG_HOST
        given = parse_qs(query).get(TOKEN, [])
        if given:
            return Verdict.SIGNED_IN if self._is_token(given[-1]) else Verdict.NO_TOKEN
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return Verdict.ALLOWED
        return Verdict.ALLOWED if self._is_token(self._in_cookie(headers)) else Verdict.NO_TOKEN

    def _is_token(self, given: str) -> bool:
        """Compared in a time that does not depend on how much of it is right."""
        assert self.token is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _in_cookie(self, headers: Mapping[str, str]) -> str:
        try:
            cookie = SimpleCookie(headers.get("Cookie", "")).get(self.cookie_name)
        except CookieError:
            return ""
        return cookie.value if cookie else ""


def host_of(header: str) -> str:
    """The name in a ``Host`` header, without its port: a tunnel may have another one."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine's own, by itself and not by what DNS
    says."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
