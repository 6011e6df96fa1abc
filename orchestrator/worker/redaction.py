"""Keep secrets out of rows and logs: error messages quote URLs, headers and environments.

Result files are shared and published, so what looks like a credential in this process's
environment, and user names and passwords inside URLs, are replaced before a message leaves the
worker, and before what Python prints gets into its log. Native code that writes to the log goes
past that; the end of a log that a row quotes is gone through once more.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from typing import TextIO

from orchestrator import output

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTH(?!OR)", re.I
)
#: ``RAY_AUTH_TOKEN_PATH`` names a file; the name is no secret and helps to find it.
_LOCATION_NAME = re.compile(r"_(PATH|FILE|DIR|SOCK)$", re.I)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@:]+(:[^/\s@]*)?@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
#: Shorter values are words such as "1" or "token", whose removal would garble messages.
_SHORTEST_SECRET = 6


def redact(text: str, environment: Mapping[str, str]) -> str:
    """``text`` with secret values of ``environment`` and credentials in URLs replaced."""
    secrets = {
        value: name
        for name, value in environment.items()
        if _SECRET_NAME.search(name)
        and not _LOCATION_NAME.search(name)
        and len(value) >= _SHORTEST_SECRET
    }
    for value in sorted(secrets, key=len, reverse=True):  # a secret may contain another
        text = text.replace(value, f"<{secrets[value]}>")
    text = _URL_CREDENTIALS.sub("<credentials>@", text)
    return _BEARER.sub(r"\1 <credentials>", text)


class Redacted(io.TextIOBase):
    """A text stream that passes on whole lines, without the secrets of ``environment``. Where a
    secret is written in parts, its line is still in one piece here."""

    def __init__(self, stream: TextIO, environment: Mapping[str, str]) -> None:
        self._stream = stream
        self._environment = environment
        self._line = ""

    def write(self, text: str) -> int:
        """Pass on what ends with a line break, keep the rest for later."""
        whole, line_break, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if line_break:
            self._stream.write(redact(whole, self._environment) + line_break)
        return len(text)

    def flush(self) -> None:
        """Pass on all there is."""
        if self._line:
            self._stream.write(redact(self._line, self._environment))
            self._line = ""
        self._stream.flush()

    def fileno(self) -> int:
        """Of the stream beneath, for child processes."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """It is."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream beneath."""
        return self._stream.encoding


def redact_output(environment: Mapping[str, str]) -> None:
    """Let nothing secret get out of this process through ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout = Redacted(output.guarded(sys.stdout), environment)
    sys.stderr = Redacted(output.guarded(sys.stderr), environment)
