"""Keep secrets out of rows: error messages quote URLs, headers and environments.

Result files are shared and published, so what looks like a credential in this process's
environment, and user names and passwords inside URLs, are replaced before a message leaves the
worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
