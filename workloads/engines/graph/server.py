"""An OpenAI-compatible server over continuous batching, as a process of its own.

    python -m workloads.engines.graph.server --model tiny-chatglm3 --port 8000

    POST /v1/completions       a text, or token ids, is continued
    POST /v1/chat/completions  messages are answered in the layout that the model was trained on
    GET  /v1/models, /health, /metrics (Prometheus)

Decoding is greedy: ``temperature`` above 0 is refused. vLLM's extensions ``ignore_eos`` and
``return_token_ids`` are known. A streamed event is sent for every token, with the text that it
completes (possibly none). The key that requests must bear comes from ``NIGHTGRID_SERVER_KEY``;
without one, everybody who reaches the address is served. The model is on the card, and every
launch recorded, before the port opens.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hmac
import json
import os
import threading
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from workloads.base import BadConfiguration, MeasureSettings, Request
from workloads.data.shapes import Turn
from workloads.devices import device_for
from workloads.engines.graph import KEY_VARIABLE
from workloads.engines.graph import engine as graph
from workloads.engines.graph.engine import ContinuousBatch, GraphEngine, Text
from workloads.engines.loaded import ContinuousGeneration

#: Exit status of a server whose generation failed; the error is on stderr.
FAILED = 70

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_LOOK_BACK = 4  # tokens that are decoded again, since a character may need several
_UNFINISHED = "\ufffd"
_LARGEST_BODY_BYTES = 64 * 2**20
_ROLES = ("system", "user", "assistant", "tool")


class Refused(Exception):
    """A request that this server does not answer; the message is the client's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One validated request."""

    prompt: Sequence[int]
    output_tokens: int
    ignore_eos: bool
    stream: bool
    usage: bool  # report it at the end of a stream
    token_ids: bool
    chat: bool


@dataclass(slots=True)
class _Running:
    """One request in the batch; ``changed`` is set when it has new tokens or has ended."""

    text: Text
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False


class Server:
    """A loaded engine behind the protocol. Handlers run in the loop, generation in a thread."""

    def __init__(self, engine: GraphEngine, *, model: str, slots: int, positions: int) -> None:
        """Record all launches for ``slots`` texts of up to ``positions`` tokens, answers included;
        BadConfiguration if the model has fewer."""
        most = engine.context_length or positions
        if positions > most:
            raise BadConfiguration(
                f"max_model_len {positions} is more than the {most} positions of {model}"
            )
        self._engine, self._model, self._positions = engine, model, positions
        self._running: dict[int, _Running] = {}  # by number of the text
        self._loop: asyncio.AbstractEventLoop | None = None
        self._prompt_tokens = self._output_tokens = self._requests = 0
        self._batch = ContinuousBatch(
            engine.generator,
            ContinuousGeneration(
                slots=slots,
                output_tokens=positions,
                on_step=lambda numbers: self._notify(tuple(numbers)),
            ),
            positions=positions,
            on_end=lambda text: self._notify((text.number,), ended=True),
            serving=True,
        )
        self._slots = slots

    def application(self, key: str) -> web.Application:
        """The application, whose start starts generation; ``key`` "" lets everybody in."""

        @web.middleware
        async def guard(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            presented = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if request.path.startswith("/v1/") and not hmac.compare_digest(presented, key):
                return _error(401, "the key of this server is missing or wrong")
            return await handler(request)

        application = web.Application(
            client_max_size=_LARGEST_BODY_BYTES, middlewares=[guard] if key else []
        )
        for path, chat in (("/v1/completions", False), ("/v1/chat/completions", True)):
            application.router.add_post(path, functools.partial(self._complete, chat=chat))
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/health", _health)
        application.router.add_get("/metrics", self._metrics)
        application.cleanup_ctx.append(self._generation)
        return application

    # ------------------------------------------------------------ generation

    async def _generation(self, _: web.Application) -> AsyncIterator[None]:
        def generate() -> None:
            try:
                self._batch.run()
            except BaseException:  # no request would ever be answered
                traceback.print_exc()
                os._exit(FAILED)

        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(target=generate, name="generation", daemon=True)
        thread.start()
        yield
        self._batch.close()
        for running in self._running.values():
            self._batch.cancel(running.text)
        await asyncio.to_thread(thread.join, 10.0)

    def _notify(self, numbers: Sequence[int], *, ended: bool = False) -> None:
        """Tell requests, from the thread, that their texts have a new token or have ended."""

        def notify() -> None:
            self._output_tokens += 0 if ended else len(numbers)
            for number in numbers:
                if (running := self._running.get(number)) is not None:
                    running.ended = ended
                    running.changed.set()

        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(notify)

    async def _tokens(self, completion: Completion) -> AsyncGenerator[list[int], None]:
        """New tokens of a request, whenever there are some."""
        ends = frozenset() if completion.ignore_eos else self._engine.end_token_ids
        try:
            text = self._batch.submit(completion.prompt, completion.output_tokens, ends)
        except ValueError as error:
            raise Refused(str(error)) from None
        # The loop runs no callback of this text before this coroutine waits.
        running = self._running[text.number] = _Running(text)
        self._requests += 1
        self._prompt_tokens += len(completion.prompt)
        sent = 0
        try:
            while not running.ended:
                await running.changed.wait()
                running.changed.clear()
                tokens = text.tokens[sent:]
                sent += len(tokens)
                if tokens:
                    yield tokens
        finally:
            del self._running[text.number]
            if not running.ended:  # the client is gone
                self._batch.cancel(text)

    # ------------------------------------------------------------ requests

    async def _complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            body = await request.json()
            completion = self._completion(body if isinstance(body, dict) else {}, chat)
            if completion.stream:
                return await self._stream(request, completion)
            return await self._answer(completion)
        except (Refused, BadConfiguration) as error:
            return _error(400, str(error))
        except (json.JSONDecodeError, UnicodeDecodeError):
            return _error(400, "the body is not JSON")

    def _completion(self, body: Mapping[str, Any], chat: bool) -> Completion:
        if body.get("model", self._model) != self._model:
            raise Refused(f"this server has the model {self._model}, not {body['model']}")
        if body.get("temperature") or (body.get("n") or 1) != 1:
            raise Refused("this server decodes greedily: write temperature 0 and n 1")
        prompt = self._messages(body) if chat else self._prompt(body)
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        room = max(self._positions - len(prompt), 0)
        if most is None:
            most = room if chat else _COMPLETION_TOKENS
        if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= room:
            raise Refused(
                f"max_tokens is {most}, and after {len(prompt)} tokens of the prompt there is room "
                f"for 1 to {room}"
            )
        options = body.get("stream_options") or {}
        return Completion(
            prompt=prompt,
            output_tokens=most,
            ignore_eos=bool(body.get("ignore_eos")),
            stream=bool(body.get("stream")),
            usage=bool(options.get("include_usage")),
            token_ids=bool(body.get("return_token_ids")),
            chat=chat,
        )

    def _prompt(self, body: Mapping[str, Any]) -> list[int]:
        """Ids of ``prompt``: a text, ids, or a list of one of them."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            prompt = list(self._engine.tokenizer(prompt)["input_ids"])
        vocabulary = self._engine.generator.decoder.embedding.shape[0]
        if (
            not isinstance(prompt, list)
            or not prompt
            or any(type(token) is not int or not 0 <= token < vocabulary for token in prompt)
        ):
            raise Refused(f"prompt is one text or a list of token ids below {vocabulary}")
        return prompt

    def _messages(self, body: Mapping[str, Any]) -> list[int]:
        """Ids of ``messages`` in the model's layout."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused("messages is a list of one or more")
        turns = []
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):  # parts, of which we read texts
                parts = (part for part in content if isinstance(part, dict))
                content = "".join(str(part.get("text", "")) for part in parts)
            if not isinstance(content, str) or message.get("role") not in _ROLES:
                raise Refused(
                    f"a message has a text as content and one of the roles {', '.join(_ROLES)}"
                )
            turns.append(Turn(role=message["role"], text=content))
        text = turns.pop().text if turns[-1].role == "user" else ""
        return self._engine.encode(text, turns)

    async def _answer(self, completion: Completion) -> web.Response:
        tokens = [token async for new in self._tokens(completion) for token in new]
        reason = self._end_reason(completion, tokens)
        choice = self._choice(completion, self._engine.decode(tokens), tokens, reason)
        body = self._body(completion, [choice])
        return web.json_response(body | {"usage": _usage(completion, len(tokens))})

    async def _stream(self, request: web.Request, completion: Completion) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers["Cache-Control"] = "no-cache"
        template = self._body(completion, [])
        tokens: list[int] = []
        written = 0  # tokens whose text was sent
        answer = self._tokens(completion)
        try:
            async for new in answer:
                if not response.prepared:  # before, a refusal is still possible
                    await response.prepare(request)
                for token in new:
                    tokens.append(token)
                    reason = self._end_reason(completion, tokens)
                    text = self._new_text(tokens, written, last=reason is not None)
                    if text is not None:
                        written = len(tokens)
                    choice = self._choice(completion, text or "", [token], reason)
                    await response.write(_event(template | {"choices": [choice]}))
        finally:
            await answer.aclose()
        if completion.usage:
            usage = _usage(completion, len(tokens))
            await response.write(_event(template | {"usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _new_text(self, tokens: Sequence[int], written: int, *, last: bool) -> str | None:
        """Text that the tokens from ``written`` on add; None while a character is unfinished."""
        context = tokens[max(written - _LOOK_BACK, 0) : written]
        before = self._engine.decode(context) if context else ""
        both = self._engine.decode([*context, *tokens[written:]])
        if both.endswith(_UNFINISHED) and not last:
            return None
        return both[len(before) :]

    def _choice(
        self, completion: Completion, text: str, tokens: Sequence[int], reason: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if completion.chat:
            message = {"role": "assistant", "content": text}
            choice["delta" if completion.stream else "message"] = message
        else:
            choice["text"] = text
        if completion.token_ids:
            choice["token_ids"] = list(tokens)
        return choice

    def _end_reason(self, completion: Completion, tokens: Sequence[int]) -> str | None:
        """Reason for which the text has ended with these tokens; None if it goes on."""
        if not completion.ignore_eos and tokens[-1] in self._engine.end_token_ids:
            return "stop"
        return "length" if len(tokens) == completion.output_tokens else None

    def _body(self, completion: Completion, choices: Sequence[Any]) -> dict[str, Any]:
        kind = "text_completion"
        if completion.chat:
            kind = "chat.completion.chunk" if completion.stream else "chat.completion"
        return {
            "id": f"{'chatcmpl' if completion.chat else 'cmpl'}-{self._requests}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
        }

    async def _models(self, _: web.Request) -> web.Response:
        about: dict[str, Any] = {"object": "model", "owned_by": "nightgrid"}
        model = {"id": self._model, **about, "max_model_len": self._positions}
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, _: web.Request) -> web.Response:
        used = sum(running.text.positions for running in self._running.values())
        gauges = {
            "requests_running": self._batch.running,
            "requests_waiting": self._batch.waiting,
            "kv_cache_usage": used / (self._slots * self._positions),
        }
        counters = {
            "requests_total": self._requests,
            "prompt_tokens_total": self._prompt_tokens,
            "output_tokens_total": self._output_tokens,
            "computed_tokens_total": self._batch.computed_tokens,
        }
        lines = []
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                lines.append(f"# TYPE nightgrid:{name} {kind}\nnightgrid:{name} {value}\n")
        return web.Response(text="".join(lines))


async def _health(_: web.Request) -> web.Response:
    return web.Response(text="")


def _usage(completion: Completion, output_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": len(completion.prompt),
        "completion_tokens": output_tokens,
        "total_tokens": len(completion.prompt) + output_tokens,
    }


def _event(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error"}
    return web.json_response({"error": error}, status=status)


def main() -> None:
    """Load the model, record its launches and serve until a signal comes."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m workloads.engines.graph.server")
    parser.add_argument("--model", required=True, help="name of a model, or a checkpoint")
    parser.add_argument("--served-model-name", help="its name in requests; default: --model")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or hpu")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-seqs", type=int, default=16, help="texts at a time")
    parser.add_argument("--max-model-len", type=int, help="tokens of a prompt and its answer")
    parser.add_argument("--settings", default="{}", help="settings of the engine, as JSON")
    parser.add_argument("--threads", type=int, help="of torch; default: OMP_NUM_THREADS")
    arguments = parser.parse_args()
    key = os.environ.pop(KEY_VARIABLE, "")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = device_for(arguments.device)
    device.configure()
    device.seed(0)
    request = Request(
        workload="text-generation",
        model=arguments.model,
        dataset="",
        precision=arguments.precision,
        batch_size=arguments.max_num_seqs,
        engine="graph",
        residency_key="",
        parameters={},
        settings=json.loads(arguments.settings),
        measure=MeasureSettings(),
    )
    engine = graph.load(request, device)
    most = engine.context_length or DEFAULT_POSITIONS
    server = Server(
        engine,
        model=arguments.served_model_name or arguments.model,
        slots=arguments.max_num_seqs,
        positions=arguments.max_model_len or min(most, DEFAULT_POSITIONS),
    )
    web.run_app(
        server.application(key),
        host=arguments.host,
        port=arguments.port,
        print=None,
        access_log=None,
        shutdown_timeout=2.0,
    )


#: Positions of a slot where neither the command line nor the model says fewer.
DEFAULT_POSITIONS = 4096

if __name__ == "__main__":
    main()
