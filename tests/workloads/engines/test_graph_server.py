"""The graph engine's own server: the protocol, the same tokens as without it, keys, streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from generation_cases import PROMPTS, request

from workloads.devices import device_for
from workloads.engines.graph import engine as graph
from workloads.engines.graph.engine import GraphEngine
from workloads.engines.graph.server import Server
from workloads.engines.loaded import Generation

T = TypeVar("T")
KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def engine() -> GraphEngine:
    return graph.load(request("", engine="graph"), device_for("cpu"))


def served(
    engine: GraphEngine, use: Callable[[aiohttp.ClientSession], Awaitable[T]], *, key: str = KEY
) -> T:
    """Run ``use`` with a client of a new server of three slots of 96 positions."""

    async def run() -> T:
        server = Server(engine, model="tiny", slots=3, positions=96)
        async with (
            TestServer(server.application(KEY)) as host,
            aiohttp.ClientSession(
                host.make_url("/"), headers={"Authorization": f"Bearer {key}"}
            ) as session,
        ):
            return await asyncio.wait_for(use(session), 60)

    return asyncio.run(run())


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with session.post(path, json={"model": "tiny", **body}) as response:
        return response.status, await response.json()


async def stream(session: aiohttp.ClientSession, path: str, **body: Any) -> list[Any]:
    """The events of a stream, without the last one, which must be [DONE]."""
    async with session.post(path, json={"model": "tiny", "stream": True, **body}) as response:
        assert response.status == 200
        text = (await response.read()).decode()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return list(map(json.loads, events))


def completed(engine: GraphEngine, path: str = "/v1/completions", **body: Any) -> Any:
    """Status and body of one request to a server of its own."""
    return served(engine, lambda session: post(session, path, **body))


def streamed(engine: GraphEngine, path: str = "/v1/completions", **body: Any) -> list[Any]:
    return served(engine, lambda session: stream(session, path, **body))


def own_tokens(engine: GraphEngine, prompt: list[int], count: int) -> list[int]:
    return list(
        engine.generate(engine.prepare([prompt]), Generation(output_tokens=count))().tokens[0]
    )


@pytest.mark.slow
def test_requests_that_run_together_get_the_tokens_of_generation_alone(engine: GraphEngine) -> None:
    prompts = [engine.encode(text) for text in PROMPTS]
    lengths = [3 + 4 * at for at in range(len(prompts))]
    pairs = list(zip(prompts, lengths, strict=True))

    async def use(session: aiohttp.ClientSession) -> Any:
        wanted = {"ignore_eos": True, "return_token_ids": True}
        bodies = [{"prompt": prompt, "max_tokens": length, **wanted} for prompt, length in pairs]
        return await asyncio.gather(*(post(session, "/v1/completions", **body) for body in bodies))

    answers = served(engine, use)
    for (status, answer), (prompt, length) in zip(answers, pairs, strict=True):
        (choice,) = answer["choices"]
        assert choice["token_ids"] == own_tokens(engine, prompt, length)
        assert status == 200 and choice["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == length


def test_a_stream_sends_each_token_and_together_the_whole_text(engine: GraphEngine) -> None:
    prompt = engine.encode(PROMPTS[0])
    tokens = own_tokens(engine, prompt, 40)
    wanted = {"ignore_eos": True, "return_token_ids": True}
    wanted["stream_options"] = {"include_usage": True}
    *events, usage = streamed(engine, prompt=prompt, max_tokens=40, **wanted)
    choices = [event["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == tokens
    assert "".join(choice["text"] for choice in choices) == engine.decode(tokens)
    assert [choice["finish_reason"] for choice in choices] == [None] * 39 + ["length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 40


def test_an_end_token_ends_a_text_unless_it_is_to_be_ignored(engine: GraphEngine) -> None:
    prompt = engine.encode(PROMPTS[1])
    plain = own_tokens(engine, prompt, 12)
    ending = replace(engine, end_token_ids=frozenset({plain[5]}))
    first = plain.index(plain[5]) + 1
    wanted = {"prompt": prompt, "max_tokens": 12, "return_token_ids": True}
    for ignored, tokens, reason in ((False, plain[:first], "stop"), (True, plain, "length")):
        (choice,) = completed(ending, **wanted, ignore_eos=ignored)[1]["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (tokens, reason)


def test_messages_are_answered_in_the_models_layout(engine: GraphEngine) -> None:
    text = engine.decode(own_tokens(engine, engine.encode("你好"), 8))
    messages = [{"role": "user", "content": "你好"}]
    wanted = {"messages": messages, "max_tokens": 8, "ignore_eos": True}
    status, answer = completed(engine, "/v1/chat/completions", **wanted)
    assert status == 200 and answer["choices"][0]["message"]["content"] == text
    events = streamed(engine, "/v1/chat/completions", **wanted)
    deltas = [event["choices"][0]["delta"]["content"] for event in events]
    assert len(deltas) == 8 and "".join(deltas) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "another"}, "has the model tiny"),
        ({"temperature": 0.7}, "greedily"),
        ({"max_tokens": 95}, "room for 1 to 93"),
        ({"max_tokens": 0}, "room for 1 to 93"),
        ({"prompt": []}, "one text or a list of token ids"),
        ({"prompt": [10**9]}, "one text or a list of token ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_with_their_reason(engine, changes, message):
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, **changes}
    status, answer = completed(engine, **body)
    assert status == 400 and message in answer["error"]["message"]


def test_only_the_key_opens_the_protocol(engine: GraphEngine) -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        status, answer = await post(session, "/v1/completions", prompt=[5], max_tokens=1)
        async with session.get("/health") as health:
            return status, answer, health.status

    assert served(engine, use, key="another")[0] == 401
    status, answer, health = served(engine, use, key="")
    assert (status, health) == (401, 200) and KEY not in str(answer)


def test_a_client_that_leaves_frees_its_slot_and_counters_say_so(engine: GraphEngine) -> None:
    async def metrics(session: aiohttp.ClientSession) -> dict[str, float]:
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.removeprefix("nightgrid:").split() for line in lines if line[0] != "#")
        return {name: float(value) for name, value in pairs}

    async def use(session: aiohttp.ClientSession) -> Any:
        body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 90, "stream": True}
        async with session.post("/v1/completions", json=body | {"ignore_eos": True}) as response:
            await response.content.readline()
            during = await metrics(session)
            response.close()
        while (after := await metrics(session))["requests_running"]:
            await asyncio.sleep(0.01)
        return during, after

    during, after = served(engine, use)
    assert during["requests_running"] == 1 and during["kv_cache_usage"] > 0
    assert after["requests_total"] == 1 and after["prompt_tokens_total"] == 2
    assert 1 <= after["output_tokens_total"] < 90
