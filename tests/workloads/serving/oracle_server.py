"""A server of OpenAI's protocol with known delays, and with known faults by the prompt.

``python oracle_server.py TTFT TPOT [CORE]`` serves on a free port of loopback, which it prints. The
first token is sent TTFT seconds after a request, each further one TPOT later; a null server has
0 and 0. A prompt that names a fault gets it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

FAULTS = ("refused", "broken", "stuck", "empty", "error event", "cut", "no json", "late")


class OracleServer:
    """The handlers, what they received, and the delays in seconds."""

    def __init__(self, ttft_s: float = 0.0, tpot_s: float = 0.0, tokens_per_event: int = 1) -> None:
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self.tokens_per_event = tokens_per_event
        self.token_ids = False
        self.usage_in_events = False
        self.ends_at: int | None = None  # tokens at which every answer ends, whatever is asked
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self.late_s: list[float] = []  # of each token behind its time

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/completions", self._counted(self._completions))
        app.router.add_post("/v1/chat/completions", self._counted(self._completions))
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def _counted(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def counted(request: web.Request) -> web.StreamResponse:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                return await handler(request)
            finally:
                self.in_flight -= 1

        return counted

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        start = asyncio.get_running_loop().time()
        body = await request.json()
        chat = request.path.endswith("chat/completions")
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        fault = _fault(body)
        if fault == "refused":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if fault == "broken":
            return web.Response(status=500, text="out of memory")
        if fault == "no json":
            return web.Response(text="<html>")
        if fault in ("stuck", "late"):
            await asyncio.sleep(3600 if fault == "stuck" else 1)
        prompt = body.get("prompt") or body.get("messages") or ""
        count = min(body["max_tokens"], self.ends_at or body["max_tokens"])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        if not body.get("stream"):
            await _until(start + self.ttft_s + self.tpot_s * (count - 1))
            return web.json_response(
                {"choices": [{"text": "a", "finish_reason": "length"}], "usage": usage}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if fault == "error event":
            await response.write(_event({"error": {"message": "the engine died"}}))
            return response
        if chat:
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            await response.write(_event(role))
        step = self.tokens_per_event
        for number in range(0, 0 if fault == "empty" else count, step):
            due = start + self.ttft_s + self.tpot_s * number
            await _until(due)
            self.late_s.append(asyncio.get_running_loop().time() - due)
            if fault == "cut" and number >= count // 2:
                request.transport.close()
                return response
            tokens = min(step, count - number)
            await response.write(_event(self._token(chat, number, tokens, count)))
        if body.get("stream_options", {}).get("include_usage"):
            await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _token(self, chat: bool, number: int, tokens: int, count: int) -> dict[str, Any]:
        last = number + tokens >= count
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
        choice |= {"delta": {"content": "a"}} if chat else {"text": "a"}
        if self.token_ids:
            choice["token_ids"] = [7] * tokens
        kind = "chat.completion.chunk" if chat else "text_completion"
        event: dict[str, Any] = {"id": "1", "object": kind, "choices": [choice]}
        if self.usage_in_events:
            event["usage"] = {"prompt_tokens": 1, "completion_tokens": number + tokens}
        return event


def _fault(body: dict[str, Any]) -> str:
    prompt = body.get("prompt")
    return prompt if prompt in FAULTS else ""


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def _until(time: float) -> None:
    """Wait for a time of the loop: timers alone are up to a millisecond late."""
    delay = time - asyncio.get_running_loop().time()
    if delay > 0.002:
        await asyncio.sleep(delay - 0.0015)
    while asyncio.get_running_loop().time() < time:
        await asyncio.sleep(0)


async def start(server: OracleServer) -> tuple[web.AppRunner, str]:
    """Serve on a free port of loopback; return the runner, to be cleaned up, and the url."""
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _serve(ttft_s: float, tpot_s: float) -> None:
    _, url = await start(OracleServer(ttft_s, tpot_s))
    print(url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if len(sys.argv) > 3:
        os.sched_setaffinity(0, {int(sys.argv[3])})
    asyncio.run(_serve(float(sys.argv[1]), float(sys.argv[2])))
