"""The load generator: sends a schedule to a server of OpenAI's protocol and records every event.

It is a process of its own, pinned to its cores, so that neither the server's work nor the worker's
delays its clock; ``run_process`` starts it and returns what it recorded. It measures itself too:
CPU time, the delay of its event loop, and how much later than planned it sent
(``statistics.client_figures`` judges them).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pyarrow as pa

from workloads.base import BadConfiguration, WorkloadError
from workloads.serving.load import Planned, Prompt, Schedule
from workloads.util.statistics import percentile

#: The request table: a row for each request that was sent, in order of ``index``.
COLUMNS = pa.schema(
    [
        ("index", pa.int32()),
        ("worker", pa.int32()),  # slot of the closed loop; 0 in an open one
        ("planned_s", pa.float64()),  # seconds from the load's start; null in a closed loop
        ("sent_s", pa.float64()),
        ("first_s", pa.float64()),  # first token; null without streaming, or if there was none
        ("ended_s", pa.float64()),  # end of the response; null if it never came
        ("input_tokens", pa.int32()),  # as the server counts, else as planned; null if unknown
        ("output_tokens", pa.int32()),
        ("token_s", pa.list_(pa.float32())),  # from sending to each streamed event with tokens
        ("tokens_per_event", pa.list_(pa.int32())),
        ("error", pa.string()),  # "kind: text" (``statistics.ERRORS``); null if none
        ("status", pa.int32()),  # of HTTP; null without a response
        ("server", pa.int32()),  # position among the target's urls
    ]
)
#: Longest text of an error that is kept.
_ERROR_LENGTH = 500
#: Below uvicorn's 5 s: an idle connection must not be used when its server is about to close it.
_KEEPALIVE_S = 4.0
_LAG_EVERY_S = 0.02
_PROGRESS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, or several behind round-robin, and how it is asked."""

    urls: Sequence[str]  # up to and without ``/v1``
    model: str
    key: str = field(default="", repr=False)  # sent as a bearer token; "": none
    api: Literal["completions", "chat"] = "completions"
    stream: bool = True
    usage: bool = True  # ask for the token counts at a stream's end (``stream_options``)
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of each request's body

    def body(self, prompt: Prompt, output_tokens: int) -> bytes:
        """Return a request's body; BadConfiguration for token ids to the chat API."""
        content: dict[str, Any] = {"prompt": prompt}
        if self.api == "chat":
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if not all(isinstance(message, Mapping) for message in messages):
                raise BadConfiguration("the chat API takes texts and messages, not token ids")
            content = {"messages": messages}
        content |= {"model": self.model, "max_tokens": output_tokens, "temperature": 0}
        if self.stream:
            content["stream"] = True
            if self.usage:
                content["stream_options"] = {"include_usage": True}
        return json.dumps({**content, **self.extra}, ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times after which the client stops waiting, in seconds."""

    send_s: float | None = None  # nothing is sent after it; None: all of the schedule is
    drain_s: float | None = None  # then requests in flight are cancelled; None: they may end
    request_s: float = 600.0  # of one request
    silence_s: float | None = None  # without an event while requests wait; the load ends then


async def drive(
    target: Target,
    schedule: Schedule,
    limits: Limits | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> pa.Table:
    """Send a schedule to a server and return the request table (``COLUMNS``).

    Requests that fail are rows with an error; nothing is sent twice. ``on_progress`` is called
    about twice a second.
    """
    load = _Load(target, schedule, limits or Limits(), on_progress)
    return await load.run()


def summary_of(table: pa.Table) -> dict[str, Any]:
    """Return what the client measured of itself and of the load, of a table that ``drive`` made.

    ``wall_s`` and ``cpu_s``; 90th percentiles of its event loop's delay (``lag_p90_s``) and of
    sending behind the planned times (``late_p90_s``; None in a closed loop); and why it ended
    (``stopped``): complete, time or silence.
    """
    summary: dict[str, Any] = json.loads((table.schema.metadata or {})[b"summary"])
    return summary


@dataclass(slots=True)
class _Response:
    """One request and what came back; times are of ``time.perf_counter``."""

    index: int
    request: Planned
    worker: int
    server: int
    sent: float
    ended: float | None = None
    status: int | None = None
    error: str | None = None
    finished: bool = False  # a finish reason or the end mark was read
    input_tokens: int | None = None
    output_tokens: int | None = None
    event_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def read_event(self, payload: bytes, at: float) -> bool:
        """Take one event of the stream; return if it brought tokens."""
        if payload == b"[DONE]":
            self.finished = True
            return False
        event = json.loads(payload)
        if "error" in event:
            self.error = self.error or _error_text("failed", event["error"])
            return False
        tokens = 0
        for choice in event.get("choices") or ():
            tokens += _tokens_of(choice)
            if choice.get("finish_reason"):
                self.finished = True
        usage = event.get("usage")
        if usage and usage.get("completion_tokens") is not None:
            # Servers that send the usage with every event tell how many tokens each one brought.
            total = int(usage["completion_tokens"])
            if event.get("choices"):
                tokens = max(0, total - sum(self.tokens))
            self.output_tokens = total
            self.input_tokens = usage.get("prompt_tokens")
        if tokens:
            self.event_s.append(at - self.sent)
            self.tokens.append(tokens)
        return tokens > 0

    def read_body(self, content: Mapping[str, Any]) -> None:
        """Take the one answer of a request without streaming."""
        usage = content.get("usage") or {}
        self.input_tokens = usage.get("prompt_tokens")
        self.output_tokens = usage.get("completion_tokens")
        if self.output_tokens is None:
            self.output_tokens = sum(_tokens_of(one) for one in content.get("choices") or ())
        self.finished = bool(self.output_tokens)

    def close(self, at: float, streamed: bool) -> None:
        """Note the end of the response, and judge if it is whole."""
        self.ended = at
        counted = sum(self.tokens)
        if self.error is None and not self.finished:
            self.error = f"incomplete: the response broke off after {counted} tokens"
        elif self.error is None and streamed and not counted:
            claim = (
                f", though its usage tells of {self.output_tokens}" if self.output_tokens else ""
            )
            self.error = f"incomplete: the response has no tokens{claim}"
        if self.output_tokens is None:
            self.output_tokens = counted


def _tokens_of(choice: Mapping[str, Any]) -> int:
    """Tokens of one choice of an event: of its ids where it has them, else one if it has text.

    A text may be empty although there is a token, half of a character; only the opening event of a
    chat (its role) and a closing one (its finish reason) carry none.
    """
    ids = choice.get("token_ids")
    if ids is not None:
        return len(ids)
    content = choice.get("delta") or choice.get("message") or choice
    if any(content.get(name) for name in ("text", "content", "reasoning_content", "reasoning")):
        return 1
    if content.get("tool_calls"):
        return 1
    return 0 if choice.get("finish_reason") or content.get("role") or not content else 1


def _error_text(kind: str, content: object) -> str:
    message = content.get("message", content) if isinstance(content, Mapping) else content
    text = message if isinstance(message, str) else json.dumps(message, default=str)
    return f"{kind}: {' '.join(text.split())}"[:_ERROR_LENGTH]


class _Load:
    def __init__(
        self,
        target: Target,
        schedule: Schedule,
        limits: Limits,
        on_progress: Callable[[], None],
    ) -> None:
        self._target, self._schedule, self._limits = target, schedule, limits
        self._on_progress = on_progress
        # Made beforehand: a long prompt's JSON would delay all other requests.
        self._bodies = [
            target.body(request.prompt, request.output_tokens) for request in schedule.requests
        ]
        path = "/v1/completions" if target.api == "completions" else "/v1/chat/completions"
        self._servers = cycle(enumerate(url.rstrip("/") + path for url in target.urls))
        waited_for = {one.after for one in schedule.requests if one.after is not None}
        self._ends = {index: asyncio.Event() for index in waited_for}
        self._responses: list[_Response] = []
        self._requests: set[asyncio.Task[None]] = set()
        self._ended = 0
        self._last_event = self._start = 0.0
        self._lags: list[float] = []
        self._stopped: Literal["complete", "time", "silence"] = "complete"

    async def run(self) -> pa.Table:
        """Send everything; see ``drive``."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self._target.key:
            headers["Authorization"] = f"Bearer {self._target.key}"
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._limits.request_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            auto_decompress=False,
        ) as session:
            gc.collect()
            gc.freeze()  # a collection over all bodies and modules would be a pause of the clock
            cpu = time.process_time()
            self._start = self._last_event = time.perf_counter()
            sending = asyncio.ensure_future(self._send_all(session))
            watching = asyncio.ensure_future(self._watch(sending))
            lagging = asyncio.ensure_future(self._measure_lag())
            try:
                with suppress(asyncio.CancelledError):
                    await sending
            finally:
                tasks = (sending, watching, lagging, *self._requests)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                gc.unfreeze()
            wall_s = time.perf_counter() - self._start
            cpu_s = time.process_time() - cpu
        return self._table({"wall_s": wall_s, "cpu_s": cpu_s})

    async def _send_all(self, session: aiohttp.ClientSession) -> None:
        if self._schedule.concurrency is None:
            await self._open_loop(session)
        else:
            requests = self._schedule.requests
            left = deque(enumerate(requests))
            for worker in range(min(self._schedule.concurrency, len(requests))):
                self._start_task(self._closed_loop(session, left, worker))
        while self._requests:
            await asyncio.wait(self._requests)

    def _start_task(self, request: Any) -> None:
        task = asyncio.ensure_future(request)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _closed_loop(
        self, session: aiohttp.ClientSession, left: deque[tuple[int, Planned]], worker: int
    ) -> None:
        while left and not self._time_is_up():
            # A user that waited for the end of another's turn would not be in flight.
            ready = (place for place, (_, one) in enumerate(left) if self._is_ready(one))
            place = next(ready, 0)
            index, request = left[place]
            del left[place]
            await self._request(session, index, request, worker)

    def _is_ready(self, request: Planned) -> bool:
        return request.after is None or self._ends[request.after].is_set()

    async def _open_loop(self, session: aiohttp.ClientSession) -> None:
        for index, request in enumerate(self._schedule.requests):
            delay = (request.at_s or 0.0) - (time.perf_counter() - self._start)
            if delay > 0:
                await asyncio.sleep(delay)
            if self._time_is_up():
                return
            self._start_task(self._request(session, index, request, 0))

    def _time_is_up(self) -> bool:
        limit = self._limits.send_s
        if limit is not None and time.perf_counter() - self._start >= limit:
            self._stopped = "time"
            return True
        return False

    async def _request(
        self, session: aiohttp.ClientSession, index: int, request: Planned, worker: int
    ) -> None:
        if request.after is not None:
            await self._ends[request.after].wait()
        server, url = next(self._servers)
        response = _Response(index, request, worker, server, time.perf_counter())
        if len(self._responses) == self._ended:  # nothing was waiting: silence begins now
            self._last_event = response.sent
        self._responses.append(response)
        try:
            async with session.post(url, data=self._bodies[index]) as answer:
                response.status = answer.status
                if answer.status != 200:
                    text = (await answer.read()).decode(errors="replace")
                    response.error = _http_error(answer.status, text)
                elif self._target.stream:
                    await self._read_stream(answer.content, response)
                else:
                    response.read_body(json.loads(await answer.read()))
            response.close(time.perf_counter(), self._target.stream)
        except asyncio.CancelledError:
            response.error = f"cancelled: {self._stopped}"
            raise
        except asyncio.TimeoutError:
            response.error = f"timeout: no end within {self._limits.request_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            response.error = _error_text("connection", f"{type(error).__name__}: {error}")
        except ValueError as error:  # no JSON
            response.error = _error_text("failed", f"{type(error).__name__}: {error}")
        finally:
            self._last_event = time.perf_counter()
            self._ended += 1
            if index in self._ends:
                self._ends[index].set()

    async def _read_stream(self, content: aiohttp.StreamReader, response: _Response) -> None:
        rest = b""
        while chunk := await content.readany():
            at = time.perf_counter()
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            for line in lines:
                if line.startswith(b"data:") and response.read_event(line[5:].strip(), at):
                    self._last_event = at
        if rest.startswith(b"data:"):
            response.read_event(rest[5:].strip(), time.perf_counter())

    async def _watch(self, sending: asyncio.Future[None]) -> None:
        """Report progress, and end the load when its time is up or the server is silent."""
        limits = self._limits
        end = None
        if limits.send_s is not None and limits.drain_s is not None:
            end = self._start + limits.send_s + limits.drain_s
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            now = time.perf_counter()
            silent_s = now - self._last_event if len(self._responses) > self._ended else 0.0
            self._on_progress()
            if end is not None and now >= end:
                self._stopped = "time"
            elif limits.silence_s is not None and silent_s > limits.silence_s:
                self._stopped = "silence"
            else:
                continue
            sending.cancel()
            return

    async def _measure_lag(self) -> None:
        """Note how much later than due a timer of the loop runs."""
        while True:
            due = time.perf_counter() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lags.append(max(0.0, time.perf_counter() - due))

    def _table(self, times: Mapping[str, float]) -> pa.Table:
        rows, late = [], []
        for response in sorted(self._responses, key=lambda one: one.index):
            sent = response.sent - self._start
            request, events = response.request, response.event_s
            if request.at_s is not None and request.after is None:
                late.append(sent - request.at_s)
            counted = response.input_tokens
            rows.append(
                {
                    "index": response.index,
                    "worker": response.worker,
                    "planned_s": request.at_s,
                    "sent_s": sent,
                    "first_s": sent + events[0] if events else None,
                    "ended_s": None if response.ended is None else response.ended - self._start,
                    "input_tokens": request.input_tokens if counted is None else counted,
                    "output_tokens": response.output_tokens,
                    "token_s": events,
                    "tokens_per_event": response.tokens,
                    "error": response.error,
                    "status": response.status,
                    "server": response.server,
                }
            )
        summary = {
            **times,
            "lag_p90_s": percentile(self._lags, 90) or 0.0,
            "late_p90_s": percentile(late, 90) if late else None,
            "stopped": self._stopped,
        }
        metadata = {"summary": json.dumps(summary)}
        return pa.Table.from_pylist(rows, schema=COLUMNS).replace_schema_metadata(metadata)


def _http_error(status: int, text: str) -> str:
    content: object = text
    with suppress(ValueError):
        content = json.loads(text)
    if isinstance(content, Mapping):
        content = content.get("error", content.get("detail", content))
    message = content.get("message", content) if isinstance(content, Mapping) else content
    return _error_text("refused" if status < 500 else "failed", f"HTTP {status}: {message}")


# ---------------------------------------------------------------- a process of its own


class ClientFailed(WorkloadError):
    """The client's process ended without a result; the message quotes its stderr."""


def run_process(
    target: Target,
    schedule: Schedule,
    limits: Limits,
    directory: Path,
    *,
    cores: Sequence[int] = (),
    on_progress: Callable[[], None] = lambda: None,
) -> pa.Table:
    """Drive a schedule from a process of its own, and return the request table.

    ``directory`` is for the table and the process's stderr, whose files are removed. The process is
    pinned to ``cores``, if any. ``on_progress`` is called about twice a second; what it raises ends
    the process. Raises ClientFailed if it ended without a result.
    """
    output, errors = directory / "requests.arrow", directory / "client.stderr"
    work = pickle.dumps((target, schedule, limits, cores, str(output)))
    try:
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", "from workloads.serving.client import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(work)
            for _ in process.stdout:  # a line for each call of ``on_progress`` there
                on_progress()
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if process.returncode:
            text = errors.read_text(errors="replace").strip()[-2000:]
            raise ClientFailed(f"the load generator exited with {process.returncode}: {text}")
        with pa.OSFile(str(output), "rb") as source, pa.ipc.open_file(source) as reader:
            return reader.read_all()
    finally:
        for path in (output, errors):
            path.unlink(missing_ok=True)


def main() -> None:
    """Drive the load that ``run_process`` pickled to stdin; print a line now and then."""
    target, schedule, limits, cores, output = pickle.load(sys.stdin.buffer)
    if cores:
        os.sched_setaffinity(0, cores)
    table = asyncio.run(drive(target, schedule, limits, lambda: print(flush=True)))
    with pa.OSFile(output, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
