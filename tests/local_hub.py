"""A Hugging Face hub on loopback: the calls that its libraries make to look up and fetch files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class LocalHub:
    def __init__(self) -> None:
        self.files: dict[tuple[str, str, str], dict[str, bytes]] = {}  # kind, repository, commit
        self.branches: dict[tuple[str, str, str], str] = {}
        self.asked: list[str] = []
        self.refuses_with = 0  # this HTTP status, whatever is asked
        self.url = ""

    def commit(self, kind: str, repository: str, files: dict[str, bytes]) -> str:
        number = len(self.files)
        made = hashlib.sha1(f"{repository} {number}".encode()).hexdigest()
        self.files[kind, repository, made] = files
        self.branches[kind, repository, "main"] = made
        return made

    def resolved(self, kind: str, repository: str, revision: str) -> str | None:
        if (kind, repository, revision) in self.files:
            return revision
        return self.branches.get((kind, repository, revision))

    def entries(self, kind: str, repository: str, commit: str) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
            for path, data in self.files[kind, repository, commit].items()
        ]


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def local_hub() -> Iterator[LocalHub]:
    hub = LocalHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing is written."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.asked.append(path)
            if hub.refuses_with:
                self._say(b"{}", {}, hub.refuses_with)
                return
            words = [unquote(word) for word in path.strip("/").split("/")]
            if words[0] == "api" and len(words) >= 6:
                only = parse_qs(urlsplit(self.path).query).get("expand", [])
                self._api(words[1], "/".join(words[2:4]), words[4], words[5], only)
                return
            kind = "datasets" if words[0] == "datasets" else "models"
            owner = words[1:] if kind == "datasets" else words
            if len(owner) > 3 and owner[2] == "resolve":
                commit = hub.resolved(kind, "/".join(owner[:2]), owner[3])
                files = hub.files.get((kind, "/".join(owner[:2]), commit or ""), {})
                data = files.get("/".join(owner[4:]))
                if data is not None and commit is not None:
                    self._say(data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit})
                    return
                self._missing("EntryNotFound")
                return
            self._missing("RepoNotFound")

        def _api(
            self, kind: str, repository: str, what: str, revision: str, only: list[str]
        ) -> None:
            commit = hub.resolved(kind, repository, revision)
            if commit is None:
                known = any(each[:2] == (kind, repository) for each in hub.files)
                self._missing("RevisionNotFound" if known else "RepoNotFound")
                return
            listed = hub.entries(kind, repository, commit)
            told: Any = listed
            if what == "revision":
                siblings = [{"rfilename": each["path"]} for each in listed]
                told = {"id": repository, "sha": commit, "siblings": siblings, "tags": []}
                told |= {"private": False, "downloads": 0, "likes": 0, "disabled": False}
                told = {k: told[k] for k in ("id", *only) if k in told} if only else told
            self._say(json.dumps(told).encode(), {"Content-Type": "application/json"})

        def _say(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _missing(self, code: str) -> None:
            self._say(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, 404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
