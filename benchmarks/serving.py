"""The load generator beside others, on a server of known delays: ``python -m benchmarks.serving``.

Each client is given by its environment, made with ``python -m venv DIR && DIR/bin/pip install
guidellm==0.8.1`` (torch==2.13.0 beside it), ``aiperf==0.13.0`` or ``inference-perf==0.7.0`` (of
Python 3.12). Clients take turns: a repeat runs each once, and ratios are of medians over repeats.
The server (``tests/workloads/serving/oracle_server.py``) knows the right answer, so that each
client is also compared with the truth. Loads lie below every client's own saturation.

Compared are the medians of TTFT and TPOT and the output tokens/s. TPOT is inference-perf's name;
AIPerf and GuideLLM call it inter-token latency, and GuideLLM's time per output token is the whole
latency over all tokens, which is something else. Throughput is tokens over the time from the first
request to the last end, except that GuideLLM and inference-perf choose the time themselves.
inference-perf reports 47 to 64 of 80 requests: its collector ends at a marker that overtakes the
records of the last second, which its worker process has not sent yet.

Before that, the client's own capacity is taken: requests/s and events/s on a server without delays,
each side pinned to a core, and the same for a second of the client's processor time, which other
processes of the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.contender import ROOT
from workloads.serving.client import Limits, Target, run_process, summary_of
from workloads.serving.load import Planned, schedule
from workloads.serving.statistics import figures

ORACLE = ROOT / "tests" / "workloads" / "serving" / "oracle_server.py"
TTFT_S, TPOT_S, TOKENS = 0.1, 0.02, 32
CONCURRENCY, REQUESTS = 8, 80
_LIMIT_S = 240.0
FIGURES = ("tokens_per_s", "ttft_s", "tpot_s", "requests", "tokens")


@contextmanager
def server(ttft_s: float, tpot_s: float, core: int | None = None) -> Iterator[str]:
    """Run the server with known delays in a process of its own; yields its address."""
    command = [sys.executable, str(ORACLE), str(ttft_s), str(tpot_s)]
    pinned = [] if core is None else [str(core)]
    process = subprocess.Popen([*command, *pinned], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def capacity(*, stream: bool, requests: int, tokens: int) -> dict[str, float]:
    """Requests and events that the client carries against a server without delays."""
    cores = sorted(os.sched_getaffinity(0))
    plan = schedule([Planned(prompt="p", output_tokens=tokens)] * requests, concurrency=32)
    with server(0, 0, cores[-1]) as url, tempfile.TemporaryDirectory() as directory:
        target = Target(urls=[url], model="m", stream=stream)
        table = run_process(target, plan, Limits(), Path(directory), cores=cores[:1])
    summary = summary_of(table)
    counted = sum(map(len, table["token_s"].to_pylist())) if stream else requests
    return {"a_second": counted / summary["wall_s"], "a_cpu_second": counted / summary["cpu_s"]}


# ---------------------------------------------------------------- the clients


def nightgrid(url: str, directory: Path, _environment: Path) -> dict[str, float]:
    """One load by this project's client."""
    plan = schedule([Planned(prompt="p" * 32, output_tokens=TOKENS)] * REQUESTS, concurrency=8)
    table = run_process(Target(urls=[url], model="m"), plan, Limits(), directory)
    ended = max(table["ended_s"].to_pylist())
    found = figures(table, (0.0, ended))
    tokens = sum(table["output_tokens"].to_pylist())
    return _figures(tokens / ended, found["ttft_p50_s"], found["tpot_p50_s"], REQUESTS, tokens)


def guidellm(url: str, directory: Path, environment: Path) -> dict[str, float]:
    """One load by GuideLLM."""
    output, tokenizer = directory / "guidellm.json", write_tokenizer(directory)
    _run(
        [
            *(environment / "bin" / "guidellm", "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},model=m,request_format=/v1/completions"),
            *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"),
            *("--output", f"kind=json,path={output}"),
        ],
        directory,
    )
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    metrics = {n: one.get("successful", one) for n, one in benchmark["metrics"].items() if one}
    count = metrics["output_token_count"]
    return _figures(
        metrics["output_tokens_per_second"]["mean"],
        metrics["time_to_first_token_ms"]["median"] / 1000,
        metrics["inter_token_latency_ms"]["median"] / 1000,
        count["count"],
        count["mean"] * count["count"],
    )


def aiperf(url: str, directory: Path, environment: Path) -> dict[str, float]:
    """One load by AIPerf; it takes tokenizers from a cache of the hub alone."""
    snapshot = "0" * 40
    repository = directory / "hub" / "hub" / "models--local--bytes"
    write_tokenizer(directory, repository / "snapshots" / snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot)
    _run(
        [
            *(environment / "bin" / "aiperf", "profile", "-m", "m", "-u", url, "--streaming"),
            *("--endpoint-type", "completions", "--concurrency", str(CONCURRENCY)),
            *("--request-count", str(REQUESTS), "--tokenizer", "local/bytes", "--isl", "32"),
            *("--osl", str(TOKENS), "--use-server-token-count", "--use-legacy-max-tokens"),
            *("--output-artifact-dir", str(directory / "aiperf"), "--ui", "none"),
        ],
        directory,
        HF_HOME=str(directory / "hub"),
    )
    exported = json.loads((directory / "aiperf" / "profile_export_aiperf.json").read_text())
    count = exported["request_count"]["avg"]
    return _figures(
        exported["output_token_throughput"]["avg"],
        exported["time_to_first_token"]["p50"] / 1000,
        exported["inter_token_latency"]["p50"] / 1000,
        count,
        exported["output_sequence_length"]["avg"] * count,
    )


def inference_perf(url: str, directory: Path, environment: Path) -> dict[str, float]:
    """One load by inference-perf."""
    lengths = {"min": 32, "max": 32, "mean": 32, "std_dev": 0, "total_count": REQUESTS + 1}
    configuration = {
        "load": {
            "type": "concurrent",
            "num_workers": 1,
            "stages": [{"num_requests": REQUESTS, "concurrency_level": CONCURRENCY}],
        },
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": "m", "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(write_tokenizer(directory))},
        "data": {
            "type": "random",
            "input_distribution": lengths,
            "output_distribution": lengths | {"min": TOKENS, "max": TOKENS, "mean": TOKENS},
        },
        "storage": {"local_storage": {"path": str(directory / "inference-perf")}},
    }
    path = directory / "inference-perf.yaml"
    path.write_text(json.dumps(configuration))
    _run([environment / "bin" / "inference-perf", "-c", path], directory)
    output = directory / "inference-perf" / "summary_lifecycle_metrics.json"
    successes = json.loads(output.read_text())["successes"]
    latency, count = successes["latency"], successes["count"]
    return _figures(
        successes["throughput"]["output_tokens_per_sec"],
        latency["time_to_first_token"]["median"],
        latency["time_per_output_token"]["median"],
        count,
        successes["output_len"]["mean"] * count,
    )


CLIENTS: Mapping[str, Callable[[str, Path, Path], dict[str, float]]] = {
    "nightgrid": nightgrid,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "inference-perf": inference_perf,
}


def _figures(*values: float) -> dict[str, float]:
    return dict(zip(FIGURES, map(float, values), strict=True))


def write_tokenizer(directory: Path, into: Path | None = None) -> Path:
    """Write a tokenizer whose tokens are bytes, which every client can load without a network."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    into = into or directory / "tokenizer"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(into)
    (into / "config.json").write_text('{"model_type": "gpt2"}')
    return into


def _run(command: list[Any], directory: Path, **variables: str) -> None:
    """Run a client; RuntimeError with the end of its output if it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    inherited = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        env=inherited | offline | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} exited with {done.returncode}: {done.stdout[-2000:]}")


# ---------------------------------------------------------------- the comparison


def compare(environments: Mapping[str, Path], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Run each client once a repeat, in turns; a failed run is printed and left out."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in environments}
    for repeat in range(repeats):
        order = list(environments)
        for name in order if repeat % 2 == 0 else reversed(order):
            with server(TTFT_S, TPOT_S) as url, tempfile.TemporaryDirectory() as directory:
                try:
                    one = CLIENTS[name](url, Path(directory), environments[name])
                except (RuntimeError, OSError, LookupError, subprocess.TimeoutExpired) as error:
                    print(f"{name}, repeat {repeat + 1}: {error}", flush=True)
                    continue
            found[name].append(one)
            print(f"{name}, repeat {repeat + 1}: {one}", flush=True)
    return found


def table(found: Mapping[str, list[dict[str, float]]]) -> str:
    """Medians over repeats, and their ratio to ours, as Markdown."""
    truth = TOKENS * CONCURRENCY / (TTFT_S + (TOKENS - 1) * TPOT_S)
    rows = {"known delays": _figures(truth, TTFT_S, TPOT_S, REQUESTS, REQUESTS * TOKENS)}
    for name, repeats in found.items():
        if repeats:
            rows[name] = {f: statistics.median(one[f] for one in repeats) for f in FIGURES}
    lines = [f"| client | repeats | {' | '.join(FIGURES)} |", "|---" * (len(FIGURES) + 2) + "|"]
    ours = rows.get("nightgrid", rows["known delays"])
    for name, medians in rows.items():
        cells = (f"{medians[f]:.5g} ({medians[f] / ours[f]:.3f})" for f in FIGURES)
        lines.append(f"| {name} | {len(found.get(name, ()))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Print capacity and comparison, and write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of each client (default 5)")
    parser.add_argument("--output", type=Path, help="JSON with every repeat")
    for name in list(CLIENTS)[1:]:
        parser.add_argument(f"--{name}", type=Path, metavar="ENV", help="its environment")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "requests": capacity(stream=False, requests=10_000, tokens=1),
        "events": capacity(stream=True, requests=300, tokens=200),
    }
    for name, rate in result.items():
        print(f"{name}: {rate['a_second']:,.0f}/s, {rate['a_cpu_second']:,.0f} a CPU second")
    given = {name: getattr(args, name.replace("-", "_")) for name in list(CLIENTS)[1:]}
    environments = {"nightgrid": Path(), **{n: env.absolute() for n, env in given.items() if env}}
    result["clients"] = compare(environments, args.repeats)
    print(table(result["clients"]))
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
