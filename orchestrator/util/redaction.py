"""Keep secrets out of rows and logs: error messages quote URLs, headers and environments.

Always redact before cutting: half of a secret is not recognised. Names such as ``GITHUB_PAT`` are
certain; for doubtful ones such as ``SORT_KEY`` a word or small number stays, since removing it
would garble log lines.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TextIO
from urllib.parse import quote, quote_plus

from orchestrator.util import output
from orchestrator.util.format import one_line

# ---------------------------------------------------------------- secrets of an environment

#: Matched inside words too: PGPASSWORD, GHTOKEN, authToken; not TOKENIZERS, nor TOKENS (a number).
_CERTAIN = re.compile(
    r"TOKEN(?!I[ZS]|S(_|$))|SECRET|PASSW|PASSPHRASE|CREDENTIAL|WEBHOOK|SIGNATURE|SSHPASS"
    r"|(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION|MASTER)_?KEY|.+_(PASS|PWD|PAT|SIG)$"
)
#: Their values are secrets unless they read as words.
_DOUBTFUL = re.compile(r"(^|_)(KEYS?|PRIVATE|DSN|COOKIE|TOKENS)(_|$)|AUTH(?!OR)|^NIGHTGRID_NOTIFY$")
#: ``RAY_AUTH_TOKEN_PATH`` names a file; that is no secret, and helps to find it.
_LOCATION = re.compile(r"_(PATH|FILE|DIR|SOCK)$")
_USER_INFO = re.compile(r"://[^\s/?#\"'@:]*:([^\s/?#\"']+)@")

#: Shorter values are words such as "1" or "token", whose removal would garble messages.
SHORTEST_SECRET = 6
_SHORTEST_DOUBTFUL = 8
_SHORTEST_LINE = 8  # of a multi-line value
#: Words, also joined as in identifiers; longer values are no words.
_WORD = re.compile(r"[A-Za-z]+([ _.-][A-Za-z]+)*|[0-9]+|[/~@][\w./~-]*")
_LONGEST_WORD = 20
_LINE_BREAK = re.compile(r"\r\n|\r|\n|\\r\\n|\\n")


@lru_cache(maxsize=4096)
def certainty(name: str) -> int:
    """Return 2 for a certainly secret name, 1 if the value decides, 0 otherwise."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper().replace("-", "_")
    if _LOCATION.search(words) or words == "OLDPWD":
        return 0
    return 2 if _CERTAIN.search(words) else 1 if _DOUBTFUL.search(words) else 0


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable's value must be redacted."""
    value = value.strip()
    sure = certainty(name)
    if not sure or len(value) < (SHORTEST_SECRET if sure == 2 else _SHORTEST_DOUBTFUL):
        return False
    if sure == 1 and len(value) < _LONGEST_WORD and _WORD.fullmatch(value):
        return False
    if name == "NIGHTGRID_NOTIFY" and value.startswith("@"):
        return False  # a file that holds the address
    return not (value.startswith("/") and os.path.exists(value))


def _secrets_in(name: str, value: str) -> Iterator[str]:
    """Yield the value, its lines, and the passwords of addresses in it."""
    if is_secret(name, value):
        yield value
        yield value.strip()
        lines = [line.strip() for line in _LINE_BREAK.split(value)]
        if len(lines) > 1:
            yield " ".join(value.split())  # as in messages put on one line
            for line in lines:
                if len(line) >= _SHORTEST_LINE and not line.startswith("-----"):
                    yield line
    for match in _USER_INFO.finditer(value):
        if len(match[1]) >= SHORTEST_SECRET:
            yield match[1]


def _spellings(value: str) -> set[str]:
    """Return a value as is, and as JSON, Python, URLs and HTML write it."""
    data = value.encode("utf-8", "surrogateescape")
    percent = {quote(data, safe=""), quote(data), quote_plus(data)}
    return {
        value,
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        repr(data)[2:-1],
        html.escape(value),
        *percent,
        *(re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), text) for text in percent),
    } - {""}


_URL_CREDENTIALS = re.compile(r"(?<=://)[^\s/?#\"']+@")
_PARAMETER = re.compile(
    r"(?:(?<=[?&#])|(?<=&amp;)|(?<=%3[Ff])|(?<=%26)|(?<=\\u0026))([A-Za-z][\w.-]*)(?:=|%3[Dd])"
)
#: Secret only as parameters of a URL.
_SECRET_PARAMETERS = {"key", "sig", "pass", "pwd", "auth", "pat"}
_PARAMETER_VALUE = re.compile(r"[^&;#\s\"'<>\\]+")
_AUTHORIZATION = re.compile(
    r"(?i)\b(authorization\W{1,4}(?:(?:bearer|basic|token)\s+)?)[^\s\"',<>]{6,}"
)
#: Prose has bearers and basics too: tokens are long, or have digits, signs or inner capitals.
_BEARER = re.compile(
    r"\b((?:[Bb]earer|BEARER)\s+)(?=[^\s,;]{20}|[^\s,;]*(?:[0-9=_~]|[a-z][A-Z]|\w[.]\w))"
    r"[\w.~+/=-]{8,}"
)
_BASIC = re.compile(
    r"\b((?:Basic|BASIC)\s+)(?=\S*(?:[0-9=]|[a-z][A-Z]))(?:[A-Za-z0-9+/]{4})+"
    r"(?:[A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)(?![\w+/=.-])"
)
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|xox[abeprs]-[\w-]{10,}|sk-(?=[\w-]*[0-9])[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
)
#: Shortest match of the four above; most details of a row are shorter.
_SHORTEST_CREDENTIALS = 14
_MARKER = r"-----(BEGIN|END) [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
_KEY_MARKER = re.compile(_MARKER)
#: Lines of a key without its end: headers, then base64. Words of prose are shorter than a line.
_KEY_BODY = re.compile(
    r"(?:(?:\s|\\[nr])*(?:Proc-Type|DEK-Info): [^\s\\]+)*"
    r"(?:(?:(?:\s|\\[nr])*[A-Za-z0-9+/]{20,}={0,2})+"
    r"(?:(?:\s|\\[nr])+[A-Za-z0-9+/]+={0,2}(?=(?:\s|\\[nr])*$))?)?"
)
_KEY_BODY_BACKWARDS = re.compile(
    r"(?:\s|[nr]\\)*={0,2}[A-Za-z0-9+/]*(?:(?:\s|[nr]\\)+[A-Za-z0-9+/]{20,})*"
)
#: Put before a line that continues a key.
_KEY_SO_FAR = f"-----BEGIN PRIVATE KEY-----\n{'A' * 64}\n"
_KEY_SHOWN = "<private key>"

#: Longer lines are passed on in parts.
_LONGEST_LINE = 1 << 16
_LONGEST_WAIT = 1 << 12


def redact(text: str, environment: Mapping[str, str]) -> str:
    """Return ``text`` without secret values of ``environment``, credentials and keys."""
    return _redactor(tuple(environment.items()))(text)


def error_line(error: object, limit: int = 500) -> str:
    """Return an error's message on one line, without secrets; its class if it has none."""
    return one_line(redact(str(error), os.environ), limit) or type(error).__name__


@lru_cache(maxsize=8)
def _redactor(variables: tuple[tuple[str, str], ...]) -> Callable[[str], str]:
    names: dict[str, str] = {}  # by every spelling of every secret
    for name, value in variables:
        for secret in _secrets_in(name, value):
            for spelling in _spellings(secret):
                names.setdefault(spelling, re.sub(r"[^\w.-]", "_", name))
    longest_first = sorted(names, key=len, reverse=True)  # a secret may contain another
    values = re.compile("|".join(map(re.escape, longest_first))) if names else None

    def redacted(text: str) -> str:
        if values is not None:
            text = values.sub(lambda match: f"<{names[match[0]]}>", text)
        if "-----" in text:
            text = _without_keys(text)
        if "://" in text:
            text = _URL_CREDENTIALS.sub("<credentials>@", text)
        if "=" in text:
            text = _without_parameters(text)
        if len(text) < _SHORTEST_CREDENTIALS:
            return text
        for pattern in (_AUTHORIZATION, _BEARER, _BASIC):
            text = pattern.sub(r"\1<credentials>", text)
        return _KNOWN_TOKEN.sub("<credentials>", text)

    return redacted


def redacted_end(text: str, length: int, environment: Mapping[str, str], *, cut: bool) -> str:
    """Return the redacted last ``length`` characters of a longer ``text`` (so that long keys are
    recognised), from a line start; ``cut``: its first line is incomplete."""
    if cut:
        _, line_break, rest = text.partition("\n")
        text = rest if line_break else text[_LONGEST_WAIT:]
    text = redact(text, environment)
    if len(text) <= length:
        return text
    text = text[-length:]
    return text.partition("\n")[2] or text


def _without_parameters(text: str) -> str:
    parts: list[str] = []
    done = 0
    for name in _PARAMETER.finditer(text):
        secret = certainty(name[1]) == 2 or name[1].lower() in _SECRET_PARAMETERS
        if name.start() < done or not secret:
            continue
        if value := _PARAMETER_VALUE.match(text, name.end()):
            parts += [text[done : value.start()], "<credentials>"]
            done = value.end()
    return "".join([*parts, text[done:]])


def _without_keys(text: str) -> str:
    """Remove private keys, also those without beginning or end."""
    parts: list[str] = []
    done = 0
    markers = list(_KEY_MARKER.finditer(text))
    for number, marker in enumerate(markers):
        if marker.start() < done:
            continue  # the end of a removed key
        following = markers[number + 1] if number + 1 < len(markers) else None
        start, end = marker.span()
        if marker[1] == "END":
            backwards = text[done:start][::-1]
            body = _KEY_BODY_BACKWARDS.match(backwards)
            start -= body.end() if body else 0
        elif following is not None and following[1] == "END":
            end = following.end()
        elif body := _KEY_BODY.match(text, end):
            end = body.end()
        parts += [text[done:start], _KEY_SHOWN]
        done = end
    return "".join([*parts, text[done:]])


class Redacted(io.TextIOBase):
    """Text stream that passes on whole lines without their secrets: a secret may be split between
    writes, so that unfinished lines wait for the rest, or for ``finish``."""

    def __init__(self, stream: TextIO, environment: Mapping[str, str]) -> None:
        self._stream = stream
        self._environment = environment
        self._line = ""  # the unfinished line
        self._in_key = False  # the last line ended inside a private key

    def write(self, text: str) -> int:
        """Pass on complete lines, keep the rest."""
        self._line += text
        end = max(self._line.rfind("\n"), self._line.rfind("\r")) + 1
        if len(self._line) - end > _LONGEST_LINE:
            end = self._line.rfind(" ") + 1 or len(self._line)
        self._pass_on(end)
        return len(text)

    def flush(self) -> None:
        """Flush complete lines."""
        self._stream.flush()

    def finish(self) -> None:
        """Pass on the rest: nothing follows."""
        self._pass_on(len(self._line))
        self._stream.flush()

    def close(self) -> None:
        """Pass on the rest; the underlying stream stays open."""
        if not self.closed:
            with contextlib.suppress(OSError, ValueError):  # it may be closed already
                self.finish()
        super().close()

    def _pass_on(self, end: int) -> None:
        lines, self._line = self._line[:end], self._line[end:]
        if self._in_key and lines:
            lines = _KEY_SO_FAR + lines
        shown = redact(lines, self._environment)
        self._stream.write(shown.removeprefix(_KEY_SHOWN) if self._in_key else shown)
        self._in_key = _ends_in_key(lines) if lines else self._in_key

    def fileno(self) -> int:
        """Return the underlying descriptor, for child processes."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the underlying stream."""
        return self._stream.encoding


def _ends_in_key(text: str) -> bool:
    """Return whether the text ends inside a private key."""
    markers = list(_KEY_MARKER.finditer(text))
    if not markers or markers[-1][1] == "END":
        return False
    body = _KEY_BODY.match(text, markers[-1].end())
    return body is not None and not text[body.end() :].strip()


def redact_output(environment: Mapping[str, str]) -> None:
    """Redact ``sys.stdout`` and ``sys.stderr`` of this process."""
    sys.stdout = Redacted(output.guarded(sys.stdout), environment)
    sys.stderr = Redacted(output.guarded(sys.stderr), environment)


def finish_output() -> None:
    """Write all pending output; nothing may be printed afterwards."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Redacted):
            stream.finish()
