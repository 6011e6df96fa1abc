"""A small server of OpenAI's protocol that can fail in the ways that real ones do.

``python faulty_server.py PORT [FAULT[=NUMBER]]``; the key is in FAULTY_SERVER_KEY. Faults:

    slow=S           is ready after S seconds
    refuses-to-start writes an error of an argument and ends
    no-memory        writes torch's words for exhausted memory and ends
    cause-above      writes an error, then what other processes write because of it, and ends
    healthy-silent   answers /health, and no request
    dies-after=N     kills itself at its request N + 1
    frozen-after=N   stops itself (SIGSTOP) at its request N + 1
    empty-after=N    answers N requests with tokens, and those after them without
    kills=N          kills the process that started it (SIGKILL) at its request N + 1
    leaves-behind    starts a process and maps a file of shared memory, whose name it writes
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN_S = 0.002


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fault, number = "", 0.0
    requests = 0
    counting = threading.Lock()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        text = f"fake:running {self.requests}\n" if self.path == "/metrics" else "{}"
        self.answer(200, text)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {os.environ['FAULTY_SERVER_KEY']}":
            self.answer(401, "{}")
            return
        with self.counting:
            Handler.requests += 1
        over = self.requests > self.number
        if self.fault == "healthy-silent":
            time.sleep(3600)
        if self.fault == "dies-after" and over:
            print("a kernel fault of the fake card", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "frozen-after" and over:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "kills" and over:
            os.kill(os.getppid(), signal.SIGKILL)
        empty = self.fault == "empty-after" and over
        count = 0 if empty else int(body["max_tokens"])
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        if not body.get("stream"):
            time.sleep(TOKEN_S * count)
            choices = [{"text": "a" * count}] if count else []
            whole = {"choices": choices, "usage": usage}
            self.answer(200, json.dumps(whole))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(count):
            time.sleep(TOKEN_S)
            self.event({"choices": [{"text": "a", "finish_reason": None}]})
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, body: Any) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


class HTTPServer(ThreadingHTTPServer):
    request_queue_size = 256
    allow_reuse_address = False


def main(port: int, fault: str, number: float) -> None:
    Handler.fault, Handler.number = fault, number
    if fault == "slow":
        time.sleep(number)
    if fault == "refuses-to-start":
        sys.exit("faulty_server.py: error: unrecognized arguments: --nonsense")
    if fault == "no-memory":
        sys.exit("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory")
    if fault == "cause-above":
        print(
            "WARNING `OSError: [Errno 24]` may come\n(Core) [core.py:9] ValueError: no cache",
            file=sys.stderr,
        )
        sys.exit("  waits for the core\n" * 30 + "RuntimeError: the core failed, see above")
    if fault == "leaves-behind":
        sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        path = f"/dev/shm/nightgrid-test-{os.getpid()}"
        handle = os.open(path, os.O_CREAT | os.O_RDWR)
        os.ftruncate(handle, 4096)
        globals()["mapped"] = mmap.mmap(handle, 4096)
        print(f"left {sleeping.pid} {path}", file=sys.stderr, flush=True)
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    name, _, value = (sys.argv[2] if len(sys.argv) > 2 else "").partition("=")
    main(int(sys.argv[1]), name, float(value or 0))
