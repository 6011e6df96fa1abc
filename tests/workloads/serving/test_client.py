"""The load generator against a server with known delays and faults."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from oracle_server import OracleServer, start

from workloads.serving import client
from workloads.serving.client import Limits, Target, drive, summary_of
from workloads.serving.load import Planned, Prompt, Schedule, schedule
from workloads.serving.statistics import client_figures, figures, steady_window


def load(*prompts: Prompt, tokens: int = 4, concurrency: int = 4) -> Schedule:
    requests = [Planned(prompt=prompt, output_tokens=tokens) for prompt in prompts]
    return schedule(requests, concurrency=concurrency)


def driven(
    server: OracleServer, plan: Schedule, limits: Limits | None = None, **target: Any
) -> pa.Table:
    """The table of a load on a server in this process."""

    async def run() -> pa.Table:
        runner, url = await start(server)
        try:
            return await drive(Target(urls=[url], model="m", **target), plan, limits)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def errors(table: pa.Table) -> list[str | None]:
    return table["error"].to_pylist()


def test_every_request_is_a_row_with_its_events_and_token_counts() -> None:
    table = driven(OracleServer(), load(*["one", (3, 4, 5)] * 3))
    assert table.schema.equals(client.COLUMNS)
    assert table["index"].to_pylist() == list(range(6)) and errors(table) == [None] * 6
    assert table["tokens_per_event"].to_pylist() == [[1, 1, 1, 1]] * 6
    assert table["output_tokens"].to_pylist() == [4] * 6
    assert table["input_tokens"].to_pylist() == [3] * 6  # as the server counts
    for row in table.to_pylist():
        first = row["sent_s"] + row["token_s"][0]
        assert row["sent_s"] < first <= row["ended_s"]
        assert row["first_s"] == pytest.approx(first, abs=1e-6)
        assert row["token_s"] == sorted(row["token_s"]) and row["planned_s"] is None


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_so_many_requests_in_flight(concurrency: int) -> None:
    server = OracleServer(ttft_s=0.01)
    table = driven(server, load(*["p"] * 12, concurrency=concurrency))
    assert server.most_in_flight == concurrency
    assert set(table["worker"].to_pylist()) == set(range(concurrency))


def test_an_open_loop_sends_at_planned_times_whatever_the_server_does() -> None:
    server = OracleServer(ttft_s=0.3)
    requests = [Planned(prompt="p", output_tokens=1, at_s=0.02 * n) for n in range(10)]
    table = driven(server, schedule(requests))
    planned, sent = table["planned_s"].to_pylist(), table["sent_s"].to_pylist()
    assert server.most_in_flight == 10
    assert all(0 <= s - p < 0.1 for p, s in zip(planned, sent, strict=True))
    assert summary_of(table)["late_p90_s"] < 0.1


def test_a_turn_of_a_chat_waits_for_the_turn_before_it() -> None:
    requests = [
        Planned(prompt="p", output_tokens=2, after=None if n < 2 else n - 2) for n in range(6)
    ]
    table = driven(OracleServer(ttft_s=0.02), schedule(requests, concurrency=6))
    sent, ended = table["sent_s"].to_pylist(), table["ended_s"].to_pylist()
    assert all(sent[n] >= ended[n - 2] for n in range(2, 6))


def test_a_free_user_takes_a_turn_that_is_ready_before_one_that_waits() -> None:
    """The first answer of four conversations is long: the others go on meanwhile."""
    requests = [
        Planned(prompt="p", output_tokens=1 if n else 60, after=None if n < 4 else n - 4)
        for n in range(12)
    ]
    server = OracleServer(ttft_s=0.005, tpot_s=0.005)
    table = driven(server, schedule(requests, concurrency=2))
    sent, ended = table["sent_s"].to_pylist(), table["ended_s"].to_pylist()
    assert table["index"].to_pylist() == list(range(12))
    assert max(sent[n] for n in range(12) if n % 4) < ended[0] <= sent[4]


def test_bodies_say_what_the_target_says() -> None:
    server = OracleServer()
    messages = ({"role": "user", "content": "hello"},)
    driven(server, load(messages), api="chat", key="k", extra={"top_p": 1})
    assert server.keys == ["Bearer k"]
    assert server.bodies == [
        {
            "messages": [{"role": "user", "content": "hello"}],
            "model": "m",
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "top_p": 1,
        }
    ]


def test_the_opening_event_of_a_chat_is_no_token() -> None:
    table = driven(OracleServer(ttft_s=0.05), load("p"), api="chat", usage=False)
    assert table["output_tokens"].to_pylist() == [4]
    assert table["token_s"].to_pylist()[0][0] >= 0.05


@pytest.mark.parametrize("setting", ["token_ids", "usage_in_events"])
def test_several_tokens_of_an_event_are_counted_where_the_server_tells(setting: str) -> None:
    server = OracleServer(tokens_per_event=3)
    setattr(server, setting, True)
    table = driven(server, load("p", tokens=7), usage=False)
    assert table["tokens_per_event"].to_pylist() == [[3, 3, 1]]
    assert table["output_tokens"].to_pylist() == [7]


def test_without_streaming_a_request_has_a_latency_and_no_first_token() -> None:
    table = driven(OracleServer(ttft_s=0.05), load("p"), stream=False)
    row = table.to_pylist()[0]
    assert (row["first_s"], row["token_s"], row["output_tokens"]) == (None, [], 4)
    assert row["ended_s"] - row["sent_s"] >= 0.05


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("refused", "refused: HTTP 404: no such model"),
        ("broken", "failed: HTTP 500: out of memory"),
        ("no json", "incomplete: the response broke off after 0 tokens"),
        ("empty", "incomplete: the response has no tokens, though its usage tells of 4"),
        ("error event", "failed: the engine died"),
        ("stuck", "timeout: no end within 0.5 s"),
    ],
)
def test_a_fault_is_a_row_with_its_kind_and_the_others_go_on(fault: str, error: str) -> None:
    table = driven(OracleServer(), load("p", fault, "p"), Limits(request_s=0.5))
    assert errors(table) == [None, error, None]


def test_a_connection_that_breaks_keeps_the_tokens_that_came() -> None:
    table = driven(OracleServer(tpot_s=0.02), load("cut"))
    assert errors(table)[0].startswith("connection: ")
    assert len(table["token_s"].to_pylist()[0]) == 2


def test_nobody_listening_is_a_connection_error() -> None:
    target = Target(urls=["http://127.0.0.1:9"], model="m")
    table = asyncio.run(drive(target, load("p", "p")))
    assert [error.partition(":")[0] for error in errors(table)] == ["connection"] * 2


def test_a_silent_server_ends_the_load() -> None:
    start_s = time.perf_counter()
    plan = load(*["p"] * 3, "stuck", "stuck")
    table = driven(OracleServer(), plan, Limits(silence_s=1.0))
    assert summary_of(table)["stopped"] == "silence" and time.perf_counter() - start_s < 10
    assert errors(table) == [None] * 3 + ["cancelled: silence"] * 2


def test_time_is_up_for_sending_and_then_for_waiting() -> None:
    limits = Limits(send_s=0.3, drain_s=0.3)
    table = driven(OracleServer(ttft_s=0.1), load("stuck", *["p"] * 50, concurrency=2), limits)
    assert summary_of(table)["stopped"] == "time" and 2 < table.num_rows < 8
    assert errors(table) == ["cancelled: time"] + [None] * (table.num_rows - 1)


def test_servers_take_turns() -> None:
    async def run() -> tuple[pa.Table, list[int]]:
        servers = [OracleServer(), OracleServer()]
        started = [await start(server) for server in servers]
        try:
            target = Target(urls=[url for _, url in started], model="m")
            table = await drive(target, load(*["p"] * 6))
        finally:
            for runner, _ in started:
                await runner.cleanup()
        return table, [len(server.bodies) for server in servers]

    table, received = asyncio.run(run())
    assert received == [3, 3] and sorted(table["server"].to_pylist()) == [0] * 3 + [1] * 3


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    target = Target(urls=["http://127.0.0.1:9"], model="m", api="chat")
    with pytest.raises(client.ClientFailed, match="takes texts and messages, not token ids"):
        client.run_process(target, load((1, 2)), Limits(), tmp_path)


@pytest.mark.slow
def test_known_delays_are_measured() -> None:
    """Within 1 ms + 2 % at the median, whenever the machine lets the server keep its time."""
    plan = load(*["p"] * 8, tokens=20, concurrency=2)
    known = {"ttft": 0.05, "tpot": 0.01, "itl": 0.01, "latency": 0.24}
    for _ in range(5):
        server = OracleServer(ttft_s=0.05, tpot_s=0.01)
        table = driven(server, plan)
        found = figures(table, steady_window(table, 2))
        differences = {name: abs(found[f"{name}_p50_s"] - known[name]) for name in known}
        if all(differences[name] <= 0.001 + 0.02 * known[name] for name in known):
            return
        assert sorted(server.late_s)[len(server.late_s) * 9 // 10] > 0.001, differences
    pytest.skip("other processes delay the server by more than a millisecond")


def test_a_slow_client_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 streams of 100 tokens a second leave 0.6 ms for each; this client takes 1 ms."""

    def loads(payload: bytes) -> Any:
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:
            pass
        return json.JSONDecoder().decode(payload.decode())

    monkeypatch.setattr(client, "json", SimpleNamespace(dumps=json.dumps, loads=loads))
    plan = load(*["p"] * 32, tokens=20, concurrency=16)
    table = driven(OracleServer(ttft_s=0.05, tpot_s=0.01), plan)
    monkeypatch.undo()
    found = figures(table, steady_window(table, 16))
    assert client_figures(summary_of(table), found)["client_bound"] == 1.0
