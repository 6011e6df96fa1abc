"""A proxy, as a process of its own, that notes and refuses every request."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

_PROXY = """
import http.server
class Refuses(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path, flush=True)
        self.send_error(403, "Access denied by squid")
    do_POST = do_CONNECT = do_HEAD = do_GET
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    address: str
    requests: list[str] = field(default_factory=list)  # filled at the end of the block

    @property
    def variables(self) -> dict[str, str]:
        """Variables that name it, in the spellings that libraries read."""
        return dict.fromkeys(("http_proxy", "HTTPS_PROXY", "ALL_PROXY"), self.address)


@contextlib.contextmanager
def refusing_proxy() -> Iterator[Proxy]:
    process = subprocess.Popen([sys.executable, "-c", _PROXY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    proxy = Proxy(f"http://127.0.0.1:{process.stdout.readline().strip()}")
    try:
        yield proxy
    finally:
        process.kill()
        proxy.requests.extend(process.communicate()[0].splitlines())
