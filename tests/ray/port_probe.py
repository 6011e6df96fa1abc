"""A port's answers to a stranger: `python port_probe.py TOKEN PORT...`, JSON.

Every method of Ray's gRPC services is called, as is every path of its HTTP servers, without a token
(TOKEN empty) or with a wrong one. For each port: "http" or "grpc", what asks for a token, and what
answers without one.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import ray

HTTP_PATHS = (
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/api/healthz"),
    ("GET", "/api/local_raylet_healthz"),
    ("GET", "/api/version"),
    ("GET", "/api/job_agent/jobs/raysubmit_x/logs"),
    ("POST", "/api/job_agent/jobs/"),
    ("POST", "/api/job_agent/jobs/raysubmit_x/stop"),
    ("POST", "/get_or_create_runtime_env"),
    ("POST", "/delete_runtime_env_if_possible"),
    ("POST", "/get_runtime_envs_info"),
)
#: Those of which the installation has no Python description.
MORE_METHODS = (
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.syncer.RaySyncer/StartSync",
    "/grpc.health.v1.Health/Check",
)


@cache
def methods() -> list[str]:
    generated = Path(ray.__file__).parent / "core" / "generated"
    found = set(MORE_METHODS)
    for file in generated.glob("*_pb2_grpc.py"):
        found.update(re.findall(r"'(/ray\.rpc\.[\w.]+/\w+)'", file.read_text()))
    return sorted(found)


def by_http(port: int, headers: dict[str, str]) -> dict[str, int] | None:
    answers = {}
    for method, path in HTTP_PATHS:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            body = json.dumps({"entrypoint": "true"}) if method == "POST" else None
            connection.request(method, path, body, headers)
            answers[f"{method} {path}"] = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
    return answers


def by_grpc(port: int, metadata: list[tuple[str, str]]) -> dict[str, str]:
    answers = {}
    # Ray's own server of node states aborts its process where this is missing (docs/security.md).
    metadata = [*metadata, ("node_id", "00" * 28)]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in methods():
            call: Any = channel.stream_stream(method)
            try:
                list(call(iter([b""]), timeout=5, metadata=metadata))
                answers[method] = "OK"
            except grpc.RpcError as error:
                answers[method] = error.code().name
    return {method: status for method, status in answers.items() if status != "UNIMPLEMENTED"}


def main(token: str, ports: list[int]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    told: dict[str, Any] = {}
    for port in ports:
        http_answers = by_http(port, headers)
        if http_answers is not None:
            statuses: dict[str, Any] = http_answers
            protocol, refusals = "http", (401, 403)
        else:
            statuses = by_grpc(port, [("authorization", f"Bearer {token}")] if token else [])
            protocol, refusals = "grpc", ("UNAUTHENTICATED",)
        told[str(port)] = {
            "protocol": protocol,
            "refused": sorted(k for k, status in statuses.items() if status in refusals),
            "answered": {k: v for k, v in statuses.items() if v not in refusals and v != 404},
        }
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], [int(port) for port in sys.argv[2:]])))
