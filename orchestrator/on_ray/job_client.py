"""Ray's HTTP interface for jobs, spoken directly: a workstation needs neither Ray nor torch.

The dashboard serves ``/api/jobs/`` (Ray's jobs REST API), ``/api/packages/`` (working directories
as zip files named by their content) and ``/api/v0/logs`` (files of a node's log directory).
"""

from __future__ import annotations

import hashlib
import http.client
import io
import itertools
import json
import os
import urllib.error
import urllib.request
import zipfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

#: Of one request; uploads of a large package take longest.
_TIMEOUT_S = 120.0
#: Of the transfer of one file; Ray's own limit is 30 s.
_FILE_S = 3600.0
#: Environment variable of Ray's own client: more headers, as a JSON object.
_HEADERS_VARIABLE = "RAY_JOB_HEADERS"
#: The earliest time that a zip file can name; the same content has the same name.
_EPOCH = (1980, 1, 1, 0, 0, 0)


class AuthenticationError(RuntimeError):
    """The server asks for another token; the message is the server's."""


class JobClient:
    """Requests to one dashboard.

    Raises OSError if it cannot be reached, RuntimeError with status code and text for refusals, and
    AuthenticationError for 401 and 403.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self._address = address.rstrip("/")
        self._headers: dict[str, str] = json.loads(os.environ.get(_HEADERS_VARIABLE) or "{}")
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        # Never through a proxy of the environment: heads are in one's own network or a tunnel.
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._head = ""  # id of the head node
        self._json("GET", "/api/version")

    def submit_job(
        self,
        *,
        entrypoint: str,
        runtime_env: Mapping[str, Any],
        submission_id: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Upload ``runtime_env``'s ``working_dir`` unless the cluster has it, start a job and
        return its id."""
        package = self._upload(Path(runtime_env["working_dir"]))
        answer = self._json(
            "POST",
            "/api/jobs/",
            {
                "entrypoint": entrypoint,
                "submission_id": submission_id,
                "runtime_env": {**runtime_env, "working_dir": package},
                "metadata": dict(metadata or {}),
            },
        )
        return str(answer["submission_id"])

    def list_jobs(self) -> list[dict[str, Any]]:
        """Every job that the cluster knows, as it describes them."""
        return list(self._json("GET", "/api/jobs/"))

    def get_job_info(self, submission_id: str) -> dict[str, Any]:
        """One job; RuntimeError with 404 if there is none of this id."""
        return dict(self._json("GET", f"/api/jobs/{submission_id}"))

    def stop_job(self, submission_id: str) -> None:
        """Have Ray end a job."""
        self._json("POST", f"/api/jobs/{submission_id}/stop")

    def delete_job(self, submission_id: str) -> None:
        """Remove a job that has ended from the cluster's list."""
        self._json("DELETE", f"/api/jobs/{submission_id}")

    def get_job_logs(self, submission_id: str) -> str:
        """All that a job has printed."""
        return str(self._json("GET", f"/api/jobs/{submission_id}/logs")["logs"] or "")

    def head_files(self, pattern: str) -> list[str]:
        """Paths of files in the head's log directory; a pattern's named links are followed."""
        answer = self._json("GET", f"/api/v0/logs?{self._on_head(glob=pattern)}")
        groups = answer["data"]["result"].values()  # by Ray's component
        return sorted(itertools.chain.from_iterable(groups))

    def head_file(self, path: str) -> bytes:
        """A whole file below the head's log directory; RuntimeError if there is none."""
        query = self._on_head(filename=path, lines="-1", timeout=f"{_FILE_S:.0f}")
        return self._request("GET", f"/api/v0/logs/file?{query}")

    def _on_head(self, **query: str) -> str:
        if not self._head:
            only = {
                "filter_keys": "is_head_node",
                "filter_predicates": "=",
                "filter_values": "true",
            }
            answer = self._json("GET", f"/api/v0/nodes?{urlencode(only)}")
            (node,) = answer["data"]["result"]["result"]
            self._head = str(node["node_id"])
        return urlencode({"node_id": self._head, **query})

    async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
        """Yield a job's output from its start, as it grows, until the job ends."""
        import aiohttp

        url = f"{self._address}/api/jobs/{submission_id}/logs/tail"
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers) as session,
                session.ws_connect(url) as socket,
            ):
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        yield message.data
                if socket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE:
                    raise RuntimeError("the connection was cut")
        except aiohttp.ClientError as error:
            raise RuntimeError(str(error)) from error

    def _upload(self, directory: Path) -> str:
        """Upload a directory and return its address for a runtime environment."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(path for path in directory.rglob("*") if path.is_file()):
                entry = zipfile.ZipInfo(path.relative_to(directory).as_posix(), _EPOCH)
                entry.external_attr = (0o100644 | (path.stat().st_mode & 0o111)) << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
        data = packed.getvalue()
        name = f"_ray_pkg_{hashlib.sha256(data).hexdigest()[:32]}.zip"
        place = f"/api/packages/gcs/{name}"
        try:
            self._request("GET", place)
        except RuntimeError as error:
            if "status code 404" not in str(error):
                raise
            self._request("PUT", place, data)
        return f"gcs://{name}"

    def _json(self, method: str, place: str, value: object = None) -> Any:
        data = None if value is None else json.dumps(value).encode()
        answer = self._request(method, place, data, {"Content-Type": "application/json"})
        return json.loads(answer or b"null")

    def _request(
        self,
        method: str,
        place: str,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        request = urllib.request.Request(
            self._address + place, data, {**(headers or {}), **self._headers}, method=method
        )
        try:
            with self._direct.open(request, timeout=_TIMEOUT_S) as answer:
                content: bytes = answer.read()
                return content
        except http.client.HTTPException as error:  # an answer that was cut
            raise RuntimeError(f"{place}: {error!r}") from error
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode("utf-8", "replace").strip()
            refusal = f"Request failed with status code {error.code}: {text or error.reason}"
            kind = AuthenticationError if error.code in (401, 403) else RuntimeError
            raise kind(refusal) from error
