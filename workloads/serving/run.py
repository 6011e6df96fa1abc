"""Serving: a model behind a server under a load of many users.

Every repeat is one *window*: the load generator, a process of its own, sends its requests, and the
steady part counts (``statistics.steady_window``). Repeats go on until output tokens/s and p90 TTFT
are known well enough. A gang's cards are dealt out to servers of ``cards_of_a_server`` cards each;
requests go to them in turn. Rank 0 starts the servers and drives the load; the other ranks lend
their cards.
"""

from __future__ import annotations

import dataclasses
import io
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from workloads.base import (
    OTHER_OUTPUTS,
    BadConfiguration,
    JobContext,
    Request,
    Result,
    ServerSilent,
    Unsupported,
    WorkloadError,
)
from workloads.bench.measure import Measured, Observation, Resident, load_resident, measure
from workloads.bench.warmup import WarmupPlan
from workloads.data.datasets import Dataset, load_dataset
from workloads.engines import engine_function
from workloads.inspection.configuration import vocabulary_size
from workloads.models.loading import ModelSource, load_config, load_tokenizer, open_model
from workloads.serving import load as loads
from workloads.serving import servers as processes
from workloads.serving import statistics
from workloads.serving.client import Limits, Target, run_process, summary_of
from workloads.serving.servers import Server
from workloads.serving.traces import read_trace
from workloads.serving.workload import ServingParameters, cards_of_a_server
from workloads.util.processes import make_owned_directory

_LEAST_REQUESTS = 50  # of a window, so that its p90 is known
_REQUESTS_PER_USER = 10
_SHORTEST_WINDOW_S = 5.0
_DRAIN_S = 30.0  # least wait for requests in flight when a window's time is up
_FIRST_ANSWER_S = 540.0  # silence until the first one without streaming; requests end at 600 s
_DRAIN_FACTOR = 2.0  # times the longest request of the load, if that is more
_COUNTERS_EVERY_S = 2.0
_SHORT = 0.99  # of the tokens asked for: answers below it were ended by the server
_CORES_FOR_PINNING = 4  # fewer are shared by server and client


# ---------------------------------------------------------------- servers of a job


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Running servers of one engine setting, and what loads must know of their model."""

    servers: tuple[Server, ...]  # empty on ranks other than 0
    source: ModelSource | None = None  # None without a checkpoint here

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        if self.source is None:
            raise BadConfiguration(
                "prompts of random tokens need the model's tokenizer here: name its checkpoint as "
                "`model`, or leave input_tokens out for prompts of the dataset"
            )
        return load_tokenizer(self.source)

    @cached_property
    def vocabulary(self) -> int:
        """Token ids of the model; those of its tokenizer where its config has none."""
        tokens = len(self.tokenizer)
        assert self.source is not None
        return min(vocabulary_size(load_config(self.source).to_dict()) or tokens, tokens)


def _start_servers(
    request: Request, context: JobContext, limit_s: float, cards: Sequence[str]
) -> Serving:
    """Start the servers of a job on rank 0, one after another."""
    import torch

    serve = engine_function(request.engine, "serve", context.device.name)
    per_server = cards_of_a_server(request.settings)
    count = context.world_size // per_server
    servers: list[Server] = []
    key = secrets.token_urlsafe(24)
    client = client_cores(cards)
    cores = sorted(os.sched_getaffinity(0) - set(client)) if client else []
    try:
        for number in range(count):
            own = cards[number * per_server : (number + 1) * per_server]
            servers.append(
                processes.start(
                    serve,
                    request,
                    context.device,
                    key=key,
                    environment=context.device.spec.visible(*own) if own else {},
                    cards=per_server,
                    threads=max(1, torch.get_num_threads() // count),
                    cores=cores,
                    limit_s=limit_s,
                )
            )
    except BaseException:
        for server in servers:
            server.stop()
        raise
    ours = servers[0].process is not None
    try:
        source = open_model(request.model, weights=ours, protected=True)
    except WorkloadError:
        if ours:
            raise
        source = None  # only a server elsewhere has it
    return Serving(servers=tuple(servers), source=source)


def _cards(context: JobContext) -> list[str]:
    """The cards of all ranks as their processes see them, in rank order; empty on CPUs.

    Unsupported if the ranks are on several hosts.
    """
    variable = context.device.spec.visible_variable
    shown = os.environ.get(variable, "") if variable else ""
    ranks = context.collective.gather((os.uname().nodename, shown))
    if len({host for host, _ in ranks}) > 1:
        raise Unsupported("this version starts servers on the cards of one node only")
    values = [card for _, cards in ranks for card in cards.split(",") if card]
    cards = list(dict.fromkeys(values))  # each rank may see all of the gang's
    return cards if len(cards) == context.world_size else []


def client_cores(cards: Sequence[str]) -> list[int]:
    """The core that the load generator is pinned to: of each job another; empty on small hosts."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < _CORES_FOR_PINNING:
        return []
    digits = "".join(filter(str.isdigit, cards[0])) if cards else ""
    return [cores[-1 - int(digits or 0) % (len(cores) // 2)]]


# ---------------------------------------------------------------- requests of a load


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of a job's windows."""

    parameters: ServingParameters
    serving: Serving
    dataset: Dataset | None  # None: prompts of random tokens, or a trace's
    #: Random tokens differ by load, since a server may cache the prompts of those before it.
    salt: str = field(default_factory=lambda: secrets.token_hex(8))

    def schedule(self, count: int, seed: int) -> loads.Schedule:
        """Requests of one window, of other tokens and times for each seed."""
        parameters = self.parameters
        requests = self._requests(count, seed)
        if self.dataset is None and not self.serving.servers[0].command.token_ids:
            decode = self.serving.tokenizer.decode  # the server takes only texts
            requests = [
                dataclasses.replace(one, prompt=decode(list(one.prompt)), input_tokens=None)
                for one in requests
            ]
        return loads.schedule(
            requests,
            concurrency=parameters.concurrency,
            request_rate=parameters.request_rate,
            arrivals=parameters.arrivals,
            seed=seed,
        )

    def _requests(self, count: int, seed: int) -> Sequence[loads.Planned]:
        parameters, serving = self.parameters, self.serving
        outputs = loads.parse_lengths(parameters.output_tokens)
        if parameters.trace:
            salt = f"{self.salt} {seed} "
            return read_trace(Path(parameters.trace), serving.vocabulary, count=count, salt=salt)
        if self.dataset is not None:
            examples = self.dataset.examples
            first = seed * count % len(examples)
            turned = [*examples[first:], *examples[:first]]
            return loads.dataset_requests(
                turned, count, outputs, chat=parameters.api != "completions", seed=seed
            )
        return loads.random_requests(
            max(1, count // parameters.turns),
            loads.parse_lengths(parameters.input_tokens or 1),
            outputs,
            serving.vocabulary,
            turns=parameters.turns,
            seed=seed,
            salt=self.salt,
            shared_prefix=parameters.shared_prefix,
            special=serving.tokenizer.all_special_ids,
        )

    def target(self) -> Target:
        """The servers as the client asks them."""
        first = self.serving.servers[0]
        api = self.parameters.api or ("completions" if self.dataset is None else "chat")
        return Target(
            urls=[server.url for server in self.serving.servers],
            model=first.command.model,
            key=first.key,
            api=api,
            stream=self.parameters.stream,
            usage=first.command.usage,
            extra={
                **first.command.body,
                **(first.command.past_end if self.parameters.ignore_eos else {}),
            },
        )


# ---------------------------------------------------------------- windows


@dataclass(kw_only=True)
class Windows:
    """Runs windows on rank 0 and keeps their tables; ranks without servers do nothing."""

    load: Load
    request: Request
    context: JobContext
    resident: Resident
    cards: Sequence[str]
    directory: Path
    tables: dict[int, pa.Table] = field(default_factory=dict)  # by repeat
    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    counters: dict[int, dict[str, float]] = field(default_factory=dict)
    timed_until: float | None = None
    longest_s: float = 0.0  # request that ended

    def run(self, repeat: int, _: int) -> Callable[[], Observation]:
        """Drive one window; see ``bench.measure.RunBatch``."""
        if not self.load.serving.servers:
            return lambda: Observation(items=0)
        settings, parameters = self.request.measure, self.load.parameters
        warmup = repeat < settings.warmup
        users = parameters.concurrency or parameters.request_rate or 0
        turns = parameters.turns if parameters.input_tokens is not None else 1
        one_each = (parameters.concurrency or 0) * turns  # a conversation for each user
        enough = max(_LEAST_REQUESTS, round(_REQUESTS_PER_USER * users), 2 * one_each)
        count = parameters.requests or enough
        limit_s = settings.time_limit_s
        if warmup:
            count = min(count, max(2 * (parameters.concurrency or 4), one_each, 4))
            limit_s = settings.warmup_limit_s
        else:
            now = self.context.clock()
            self.timed_until = self.timed_until or now + limit_s
            limit_s = max(self.timed_until - now, _SHORTEST_WINDOW_S)
        schedule = self.load.schedule(count, seed=repeat)
        table, self.counters[repeat] = self._drive(schedule, limit_s)
        if not table["error"].null_count:  # its time was up; it is no sample of the rate
            return lambda: Observation(items=0)
        whole = pc.subtract(table["ended_s"], table["sent_s"]).drop_null().to_pylist()
        self.longest_s = max([self.longest_s, *whole])
        if warmup:
            took = pc.subtract(table["first_s"], table["sent_s"]).drop_null().to_pylist()
            known = self.resident.known
            known["longest_first_token_s"] = max([known.get("longest_first_token_s", 0.0), *took])
        observed = self._observe(repeat, table)
        return lambda: observed

    def _drive(self, schedule: loads.Schedule, limit_s: float) -> tuple[pa.Table, dict[str, float]]:
        """Run the client; return its table and the servers' counters. Raises ServerSilent or what
        ``Server.check`` does if a server fails, and with the first error if no request was
        answered, unless timed windows were measured before its time was up."""
        servers = self.load.serving.servers
        longest = self.resident.known.get("longest_first_token_s", 0.0)
        if not self.load.parameters.stream:
            # Nothing is heard of a request before its end.
            longest = self.longest_s or _FIRST_ANSWER_S / processes.SILENCE_FACTOR
        silence_s = max(processes.SILENCE_S, processes.SILENCE_FACTOR * longest)
        counters = _Counters(servers, self.context.clock)

        def on_progress() -> None:
            for server in servers:
                server.check()
            counters.look()

        table = run_process(
            self.load.target(),
            schedule,
            Limits(
                send_s=limit_s,
                drain_s=max(_DRAIN_S, _DRAIN_FACTOR * self.longest_s),
                silence_s=silence_s,
            ),
            self.directory,
            cores=client_cores(self.cards),
            on_progress=on_progress,
        )
        for server in servers:
            server.check()
        if summary_of(table)["stopped"] == "silence":
            waiting = sum(ended is None for ended in table["ended_s"].to_pylist())
            quoted = servers[0].quoted()
            for server in servers:
                server.stop()
            raise ServerSilent(
                f"the server ran and emitted nothing for {silence_s:g} s while {waiting} requests "
                f"waited; it was ended. Its stderr: {quoted or 'empty'}"
            )
        errors = table["error"].to_pylist()
        timed = any(repeat >= self.request.measure.warmup for repeat in self.tables)
        cancelled = all(error and error.startswith(statistics.CANCELLED) for error in errors)
        if all(errors) and not (timed and cancelled):
            text = f"no request was answered; the first error: {errors[0] if errors else 'none'}"
            refused = bool(errors) and all(error.startswith("refused") for error in errors)
            raise BadConfiguration(text) if refused else RuntimeError(text)
        return table, counters.figures()

    def _observe(self, repeat: int, table: pa.Table) -> Observation:
        window = statistics.steady_window(table, self.load.parameters.concurrency)
        limits = statistics.parse_slo(self.load.parameters.slo)
        figures = statistics.figures(table, window, limits, self.context.world_size)
        figures |= statistics.client_figures(summary_of(table), figures)
        self.tables[repeat], self.figures[repeat] = table, figures
        span = figures["window_s"]
        output = round(figures.get("output_tokens_per_s", 0.0) * span)
        total = round(figures.get("total_tokens_per_s", 0.0) * span)
        return Observation(
            items=round(figures.get("requests_per_s", 0.0) * span),
            input_tokens=max(total - output, 0),
            output_tokens=output,
            computed_tokens=total,
            ttft_s=figures.get("ttft_p50_s"),
            window_s=span,
        )

    def is_tight(self) -> bool:
        """Tell if p90 TTFT is known as well as throughput must be, and p99 at all."""
        settings = self.request.measure
        timed = [repeat for repeat in sorted(self.figures) if repeat >= settings.warmup]
        figures = [self.figures[repeat] for repeat in timed]
        if not figures:
            return True  # a rank without servers
        enough = sum(one["requests_measured"] for one in figures) >= statistics.least_requests(99)
        return (enough or self.load.parameters.requests is not None) and statistics.is_tight(
            figures, settings.confidence, settings.relative_half_width
        )

    def _timed(self, measured: Measured) -> list[int]:
        return [s.repeat for s in measured.samples if not s.warmup and s.repeat in self.tables]

    def result_figures(self, measured: Measured) -> dict[str, float]:
        """Figures of all timed windows: rates by their lengths, latencies of all requests."""
        timed = self._timed(measured)
        if not timed:
            return {}
        tables = [self.tables[repeat] for repeat in timed]
        concurrency = self.load.parameters.concurrency
        windows = [statistics.steady_window(table, concurrency) for table in tables]
        pooled = statistics.figures(
            pooled_table(tables, windows),
            (0.0, sum(end - start for start, end in windows)),
            statistics.parse_slo(self.load.parameters.slo),
            self.context.world_size,
        )
        rates = combined([self.figures[repeat] for repeat in timed])
        counters = combined([self.counters[repeat] | {"window_s": 1.0} for repeat in timed])
        counters.pop("window_s")
        return pooled | rates | counters

    def request_table(self, measured: Measured) -> bytes:
        """All timed requests as an Arrow IPC file, with the repeat of each."""
        parts = [
            self.tables[repeat]
            .replace_schema_metadata(None)
            .append_column("repeat", pa.array([repeat] * len(self.tables[repeat]), pa.int32()))
            for repeat in self._timed(measured)
        ]
        sink = io.BytesIO()
        table = pa.concat_tables(parts)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        return sink.getvalue()


_RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "tokens_per_s_per_card")


def combined(windows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Rates, the client's own figures and counters of several windows: means by their lengths,
    totals summed, the largest of ``client_bound``."""
    span = sum(window["window_s"] for window in windows)
    result: dict[str, float] = {"window_s": span}
    for name in dict.fromkeys(name for window in windows for name in window):
        having = [window for window in windows if name in window]
        if name == "client_bound":
            result[name] = max(window[name] for window in having)
        elif name.endswith("_total"):
            result[name] = sum(window[name] for window in having)
        elif (name in _RATES or name.startswith(("client_", "server_"))) and span > 0:
            weights = [window["window_s"] for window in having]
            weighted = sum(w[name] * s for w, s in zip(having, weights, strict=True))
            result[name] = weighted / sum(weights)
    return result


def pooled_table(tables: Sequence[pa.Table], windows: Sequence[tuple[float, float]]) -> pa.Table:
    """Requests that were sent within the windows, as if these followed one another from 0 on."""
    parts, offset = [], 0.0
    for table, (start, end) in zip(tables, windows, strict=True):
        sent = table["sent_s"]
        part = table.filter(pc.and_(pc.greater_equal(sent, start), pc.less_equal(sent, end)))
        for name in ("sent_s", "first_s", "ended_s"):
            at = part.schema.get_field_index(name)
            part = part.set_column(at, name, pc.add(part[name], offset - start))
        parts.append(part.replace_schema_metadata(None))
        offset += end - start
    return pa.concat_tables(parts)


class _Counters:
    """The servers' counters during a window: means of gauges, increases of totals."""

    def __init__(self, servers: Sequence[Server], clock: Callable[[], float]) -> None:
        self._servers, self._clock = servers, clock
        self._looks: list[dict[str, float]] = []
        self._last_at = clock()
        self._first = self._sums()

    def look(self) -> None:
        """Read them, if it is time. A server that is stuck answers nothing: what waits for it here
        delays the news of its silence."""
        if self._clock() - self._last_at >= _COUNTERS_EVERY_S:
            self._looks.append(self._sums(timeout_s=_COUNTERS_EVERY_S))
            self._last_at = self._clock()

    def figures(self) -> dict[str, float]:
        """Figures of the window, by the names of ``SERVER_FIGURES``."""
        last = self._sums()
        looks = self._looks or [last]
        result = {}
        for name, value in last.items():
            if name.endswith("_total"):
                result[name] = value - self._first.get(name, 0.0)
            else:
                result[name] = sum(look.get(name, 0.0) for look in looks) / len(looks)
        return result

    def _sums(self, timeout_s: float = processes.REQUEST_S) -> dict[str, float]:
        parts = [server.counters(timeout_s) for server in self._servers]
        return {
            name: sum(part.get(name, 0.0) for part in parts)
            / (len(parts) if name == "server_kv_cache" else 1)
            for name in dict.fromkeys(name for part in parts for name in part)
        }


# ---------------------------------------------------------------- the workload


def _short_answers(parameters: ServingParameters, figures: Mapping[str, float]) -> dict[str, str]:
    """The detail of a row whose answers end before the length that was asked for exactly."""
    asked = loads.parse_lengths(parameters.output_tokens)
    mean = figures.get("output_tokens_mean", asked.first)
    exact = parameters.ignore_eos and asked.kind == "fixed" and not parameters.trace
    if not exact or mean >= _SHORT * asked.first:
        return {}
    return {OTHER_OUTPUTS: f"ignore_eos asked for {asked.first:g} tokens; answers have {mean:.1f}"}


def run(request: Request, context: JobContext) -> Result:
    """Measure a load on a served model; see ``workloads.base.Workload``."""
    parameters = ServingParameters.model_validate(dict(request.parameters))
    context.enter_phase("load")
    cards = _cards(context)

    def loader(request: Request, _: object) -> Serving:
        if context.rank:
            return Serving(servers=())
        return _start_servers(request, context, parameters.start_limit_s, cards)

    resident, load_s = load_resident(request, context, loader)
    context.collective.gather(None)  # the others wait here while the servers start
    serving: Serving = resident.engine
    random = parameters.input_tokens is not None or bool(parameters.trace)
    dataset = None if random else load_dataset(request.dataset, parameters.reading())
    load = Load(parameters=parameters, serving=serving, dataset=dataset)
    directory = make_owned_directory("ng-", Path(tempfile.gettempdir()))
    try:
        windows = Windows(
            load=load,
            request=request,
            context=context,
            resident=resident,
            cards=cards,
            directory=directory.path,
        )
        measured = measure(
            windows.run,
            1,
            request.measure,
            context,
            WarmupPlan(restarts=False),
            counted=False,
            together=context.world_size > 1,
            tight=windows.is_tight,
        )
    finally:
        directory.remove()
    source = serving.source
    figures = windows.result_figures(measured) if serving.servers else {}
    samples = measured.samples
    if serving.servers:  # a window without a table was cut by the time limit
        samples = tuple(
            dataclasses.replace(one, complete=one.complete and one.repeat in windows.tables)
            for one in samples
        )
    return Result(
        samples=samples,
        stop_reason=measured.stop_reason,
        **measured.warmup,
        load_s=load_s,
        baseline_host_memory_bytes=resident.baseline_host_memory_bytes,
        random_weights=source is not None and source.random_weights,
        synthetic_data=dataset.synthetic if dataset is not None else not parameters.trace,
        metrics=figures,
        details={
            **(dataset.details if dataset is not None else {}),
            **({"servers": str(len(serving.servers))} if serving.servers else {}),
            **_short_answers(parameters, figures),
            "client_cores": " ".join(map(str, client_cores(cards))) or "not pinned",
        },
        requests=windows.request_table(measured) if serving.servers else None,
    )
