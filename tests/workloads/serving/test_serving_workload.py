"""The workload on a small server that can fail: windows, residency, request tables, faults."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from generation_cases import ONCE, Worker, described, request
from oracle_server import OracleServer, start
from test_servers import faulty

from workloads.base import OTHER_OUTPUTS, MeasureSettings, Request, ServerSilent
from workloads.engines.base import ServerCommand
from workloads.registry import find_workload
from workloads.rules import refusals
from workloads.serving import run as serving_run
from workloads.serving import servers
from workloads.serving.client import COLUMNS, Limits, drive
from workloads.serving.run import Load, combined, pooled_table, run
from workloads.serving.statistics import parse_slo
from workloads.serving.workload import ServingParameters

MEASURE = MeasureSettings(warmup=1, min_repeats=2, max_repeats=2, time_limit_s=60)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Changed by a test before it runs: the fault of servers that are started."""
    chosen = [""]

    def engine_function(*_: str) -> Any:
        return lambda job, place: faulty(chosen[0])(job, place)

    monkeypatch.setattr(serving_run, "engine_function", engine_function)
    return chosen


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[OracleServer]:
    """A server with known delays that is there already; the client runs in this process."""
    server, loop = OracleServer(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner, url = asyncio.run_coroutine_threadsafe(start(server), loop).result(10)

    def engine_function(*_: str) -> Any:
        return lambda job, place: ServerCommand(url=url, model="m")

    def run_process(target: Any, plan: Any, limits: Any, _: Path, **options: Any) -> pa.Table:
        return asyncio.run(drive(target, plan, limits, options["on_progress"]))

    monkeypatch.setattr(serving_run, "engine_function", engine_function)
    monkeypatch.setattr(serving_run, "run_process", run_process)
    yield server
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def job(**changes: Any) -> Request:
    settings = {
        "concurrency": 2,
        "input_tokens": 6,
        "output_tokens": 4,
        "requests": 8,
        "slo": "ttft_s=5, latency_s=60",
        "measure": MEASURE,
    }
    return request("", workload="serving", engine="graph", batch_size=1, **settings | changes)


@pytest.mark.slow
def test_one_start_serves_all_loads_and_each_row_has_its_requests(
    fault: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of a load lies around afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    worker = Worker()
    first = run(job(), worker.context())
    second = run(job(concurrency=4, requests=12), worker.context())
    (resident,) = worker.loaded.values()
    resident.engine.servers[0].stop()
    assert list(tmp_path.iterdir()) == []
    assert first.load_s > 0 and second.load_s == 0
    assert [s.repeat for s in second.samples] == [0, 1, 2]
    assert [s.warmup for s in second.samples] == [True, False, False]
    assert worker.phases == ["load", "warmup", "measure", "finish"] * 2
    for result, count in ((first, 8), (second, 12)):
        assert result.requests is not None
        table = pa.ipc.open_file(io.BytesIO(result.requests)).read_all()
        assert table["repeat"].to_pylist() == [1] * count + [2] * count
        assert table["output_tokens"].to_pylist() == [4] * (2 * count)
        assert table["error"].null_count == 2 * count
        metrics = result.metrics
        timed = [s for s in result.samples if not s.warmup]
        span = sum(s.wall_s for s in timed)
        assert metrics["window_s"] == pytest.approx(span)
        tokens = sum(s.output_tokens for s in timed)
        assert metrics["output_tokens_per_s"] == pytest.approx(tokens / span, rel=0.2)
        assert metrics["within_slo"] == 1 and metrics["error_share"] == 0
        assert 0 < metrics["ttft_p50_s"] < metrics["latency_p50_s"]
        assert metrics["server_running"] > 0


@pytest.mark.slow
def test_a_server_that_falls_silent_is_ended_and_the_row_says_so(
    fault: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SILENCE_S", 1.0)
    monkeypatch.setattr(servers, "END_S", 1.0)
    fault[0] = "frozen-after=14"  # readiness 1, warm-up 4, the first window 8
    worker = Worker()
    with pytest.raises(ServerSilent, match="emitted nothing for 1 s while 2 requests waited"):
        run(job(), worker.context())
    (resident,) = worker.loaded.values()
    assert resident.engine.servers[0].process.poll() is not None


def test_conversations_of_many_turns_keep_every_user_in_flight(oracle: OracleServer) -> None:
    oracle.ttft_s = 0.003
    settings = {"concurrency": 4, "turns": 20, "input_tokens": 1, "output_tokens": 1}
    run(job(**settings, requests=None, measure=ONCE), Worker().context())
    assert oracle.most_in_flight == 4
    # The first token, and two conversations for each user.
    assert len(oracle.bodies) == 1 + 2 * 4 * 20


def test_answers_that_end_although_none_may_are_other_outputs(oracle: OracleServer) -> None:
    """Not every server knows ``ignore_eos``; its figures would be of another work."""
    asked = {"output_tokens": 20, "measure": ONCE}
    worker = Worker()
    assert OTHER_OUTPUTS not in run(job(**asked, ignore_eos=True), worker.context()).details
    oracle.ends_at = 5
    assert OTHER_OUTPUTS not in run(job(**asked), worker.context()).details
    details = run(job(**asked, ignore_eos=True), worker.context()).details
    assert details[OTHER_OUTPUTS] == "ignore_eos asked for 20 tokens; answers have 5.0"


def scripted(monkeypatch: pytest.MonkeyPatch, *took_s: float | None) -> list[Limits]:
    """Windows whose requests take so long each, or (None) are cut by the window's end; returns the
    limits of those that were driven."""
    driven: list[Limits] = []

    def run_process(_: Any, plan: Any, limits: Limits, *__: Any, **___: Any) -> pa.Table:
        end = took_s[len(driven)]
        driven.append(limits)
        row: dict[str, Any] = {"worker": 0, "sent_s": 0.0, "token_s": [], "tokens_per_event": []}
        row |= {"ended_s": end, "input_tokens": 6, "output_tokens": 4, "status": 200, "server": 0}
        row["error"] = None if end else "cancelled: time"
        rows = [row | {"index": index} for index in range(len(plan.requests))]
        summary: dict[str, Any] = {
            "wall_s": 1.0,
            "cpu_s": 0.1,
            "lag_p90_s": 0.0,
            "late_p90_s": None,
        }
        summary["stopped"] = "complete" if end else "time"
        metadata = {"summary": json.dumps(summary)}
        return pa.Table.from_pylist(rows, COLUMNS).replace_schema_metadata(metadata)

    monkeypatch.setattr(serving_run, "run_process", run_process)
    return driven


THRICE = MeasureSettings(warmup=0, min_repeats=3, max_repeats=3, time_limit_s=60)


def test_long_requests_may_end_after_the_time_to_send(
    oracle: OracleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = scripted(monkeypatch, 10.0, 100.0, 100.0)
    run(job(measure=THRICE), Worker().context())
    assert [limits.drain_s for limits in driven] == [30, 30, 200]


def test_without_streaming_a_server_is_silent_until_an_answer_ends(
    oracle: OracleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = scripted(monkeypatch, 10.0, 100.0, 100.0)
    run(job(measure=THRICE, stream=False), Worker().context())
    assert [limits.silence_s for limits in driven] == [540, 60, 500]


def test_a_window_that_the_time_limit_cut_leaves_those_before_it(
    oracle: OracleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 1.0, 1.0, None)
    result = run(job(measure=THRICE), Worker().context())
    assert [sample.complete for sample in result.samples] == [True, True, False]
    assert result.metrics["requests_measured"] == 16
    scripted(monkeypatch, None)
    with pytest.raises(RuntimeError, match="no request was answered"):
        run(job(measure=THRICE), Worker().context())


def of_random_tokens(**settings: Any) -> Load:
    """A load on a server that takes token ids, of a model with 32,000 tokens."""
    serving: Any = SimpleNamespace(
        servers=[SimpleNamespace(command=SimpleNamespace(token_ids=True))],
        tokenizer=SimpleNamespace(all_special_ids=[0]),
        vocabulary=32_000,
    )
    parameters = ServingParameters.model_validate(settings)
    return Load(parameters=parameters, serving=serving, dataset=None)


def prompts(load: Load, count: int, seed: int) -> list[Any]:
    return [request.prompt for request in load.schedule(count, seed).requests]


def test_loads_of_equal_seed_share_no_prompt_beyond_the_prefix() -> None:
    """One server answers several loads, and its cache may know the prompts of those before."""
    settings = {"input_tokens": "uniform(30, 60)", "shared_prefix": 20}
    first, second = (of_random_tokens(concurrency=users, **settings) for users in (1, 8))
    ours, theirs = prompts(first, 50, 1), prompts(second, 50, 1)
    assert [len(one) for one in ours] == [len(one) for one in theirs]
    for number in (20, 30):  # a cache compares beginnings
        assert not {one[:number] for one in ours} & {one[:number] for one in theirs}
    assert len({one[:20] for one in ours}) == 1 and len({one[:30] for one in ours}) == 50


def test_a_window_of_a_trace_shares_blocks_within_itself_alone(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 2}
    lines = [line | {"hash_ids": [0, 1]}, line | {"hash_ids": [0, 2]}, line]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    load = of_random_tokens(trace=str(path))
    windows = [prompts(load, 3, 1), prompts(load, 3, 2)]
    windows.append(prompts(of_random_tokens(trace=str(path)), 3, 1))
    for one, other, _ in windows:
        assert one[:512] == other[:512] and one[512:] != other[512:]
    assert len({prompt[:30] for window in windows for prompt in window}) == 6


@pytest.mark.parametrize(
    ("changes", "setting", "reason"),
    [
        ({"batch_size": 4}, "batch_size", "batches of what arrives"),
        ({"concurrency": None}, "concurrency", "closed loop"),
        ({"request_rate": 2.0}, "request_rate", "closed loop"),
        ({"cards": 3, "tensor_parallel": 2}, "cards", "servers of 2 cards"),
        ({"input_tokens": "some"}, "input_tokens", "no length"),
        ({"slo": "ttft=1"}, "slo", "no limit"),
        ({"arrivals": "sometimes"}, "arrivals", "no pattern"),
        ({"max_model_len": 9}, "max_model_len", "10 tokens in and out"),
        ({"api": "chat"}, "api", "token ids"),
        ({"concurrency": 9, "requests": 8}, "requests", "8 requests are fewer than 9 users"),
        (
            {"concurrency": 4, "turns": 5, "requests": 19},
            "requests",
            "19 requests in conversations of 5 turns are fewer conversations than 4 users",
        ),
    ],
)
def test_loads_that_contradict_themselves_are_refused(
    changes: dict[str, Any], setting: str, reason: str
) -> None:
    settings = {"concurrency": 1, "input_tokens": 6, "output_tokens": 4, "slo": "", **changes}
    found = refusals(find_workload("serving"), described(engine="graph", **settings))
    assert any(r.setting == setting and reason in r.reason for r in found), found


def test_no_server_is_started_on_cards_that_one_process_holds() -> None:
    """The worker holds a Gaudi card: a server's failure to acquire it would blame the card."""
    workload = find_workload("serving")
    load = {"concurrency": 1, "input_tokens": 6, "output_tokens": 4, "slo": "", "device": "hpu"}
    assert {"graph", "transformers", "endpoint"} <= set(workload.engines)
    for engine in workload.engines:
        elsewhere = {"url": "http://host:1"} if engine == "endpoint" else {}
        found = refusals(workload, described(engine=engine, **load, **elsewhere))
        assert any(r.unsupported for r in found) == (engine != "endpoint"), (engine, found)


def test_limits_are_read_with_their_names() -> None:
    assert parse_slo("ttft_s=0.5, tpot_s=0.05") == {"ttft_s": 0.5, "tpot_s": 0.05}


def test_windows_are_combined_by_their_lengths() -> None:
    windows = [
        {"window_s": 1.0, "output_tokens_per_s": 10.0, "client_bound": 0.0},
        {"window_s": 3.0, "output_tokens_per_s": 20.0, "client_bound": 1.0},
    ]
    result = combined(windows)
    assert result == {"window_s": 4.0, "output_tokens_per_s": 17.5, "client_bound": 1.0}


def test_pooled_requests_are_those_of_the_windows_one_after_another() -> None:
    table = pa.table(
        {"sent_s": [0.0, 1.0, 2.0], "first_s": [0.5, 1.5, None], "ended_s": [1.0, 2.0, 3.0]}
    )
    pooled = pooled_table([table, table], [(1.0, 2.0), (0.0, 1.0)])
    assert pooled["sent_s"].to_pylist() == [0.0, 1.0, 1.0, 2.0]
    assert pooled["first_s"].to_pylist() == [0.5, None, 1.5, 2.5]
