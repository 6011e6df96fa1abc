"""Commands for models and data: ``describe``, ``convert``, ``protect``, ``dataset``, ``verify``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from orchestrator.cli import options as shared
from orchestrator.core import errors
from orchestrator.core.errors import GridError, NightgridError, Problem
from orchestrator.driver.plan import commits_before, grid_of
from orchestrator.driver.run import run_grid
from orchestrator.grid import grid_path
from orchestrator.grid.parser import grid_of_values
from orchestrator.planning.verification import Verified, verification_grid, verified
from orchestrator.report.run_report import read_summary, write_aside
from orchestrator.util import output
from orchestrator.util.format import plural, size
from workloads.base import BadConfiguration
from workloads.data import storage
from workloads.data.datasets import Reading, find_dataset, load_examples, without_use
from workloads.data.lengths import Description as DatasetDescription
from workloads.data.lengths import (
    describe,
    read_directory,
    sample_by_length,
    token_lengths,
    write_synthetic,
)
from workloads.data.records import ADVERTISEGEN_FILES
from workloads.data.shapes import write_json_lines
from workloads.inspection.checkpoints import protected_files
from workloads.models import encryption
from workloads.models.chatglm3.conversion import convert
from workloads.models.describe import Description, describe_model, refuse_odd
from workloads.models.drawing import draw_slide, draw_svg, draw_text, picture_of
from workloads.models.hub import Revisions
from workloads.models.loading import load_tokenizer, open_model


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    """
    examples:
      nightgrid describe tiny-chatglm3
      nightgrid describe chatglm3-6b/config.json --svg chatglm3.svg
    """
    parser.add_argument(
        "model", help="an embedded model, a directory, a config.json (ChatGLM3's own too), a hub id"
    )
    parser.add_argument(
        "--lora-rank", type=shared.whole_number, default=8, metavar="R", help="default: 8"
    )
    shared.add(parser, "--json")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--pptx", type=Path, metavar="FILE", help="write it as a slide")


def run_describe(args: argparse.Namespace) -> int:
    """Describe, then print."""
    description = describe_model(args.model, lora_rank=args.lora_rank)
    title = f"{description.model}: {description.parameters:,} parameters"
    for file, drawn in ((args.svg, draw_svg), (args.pptx, draw_slide)):
        if file is not None:
            write_aside(file, drawn(picture_of(description), title))
            output.say_aside(f"wrote {file}")
    if args.json:
        output.say_json(asdict(description), indent=2, ensure_ascii=False)
        return 0
    width = None if sys.stdout.isatty() else 110  # a pipe has no width; tables must not fold
    print_description(description, output.console(highlight=False, width=width))
    return 0


def print_description(description: Description, console: Console) -> None:
    """All parts, for people."""
    random = "  (random weights: its texts mean nothing)" if description.random_weights else ""
    name = description.architecture.name
    console.print(Text.assemble((description.model, "bold"), f"  {name}{random}"))
    console.print(f"{description.parameters:,} parameters\n")
    for line in draw_text(picture_of(description)):
        console.print(line, markup=False, no_wrap=True, overflow="ignore", crop=False)
    console.print()
    _print_tables(description, console)
    prompt = description.prompt
    console.print("Prompt", style="italic")
    lines = {"layout": prompt.layout}
    if prompt.ids:
        lines |= {"example": prompt.example, "tokens": " ".join(prompt.tokens)}
        lines["ids"] = " ".join(map(str, prompt.ids))
    for name, text in {**lines, "note": prompt.note}.items():
        if text:
            console.print(f"  {name:8} {text}", markup=False)


def _print_table(
    console: Console,
    title: str,
    first: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> None:
    table = Table(*first, title=title, title_justify="left")
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_tables(description: Description, console: Console) -> None:
    whole = max(description.parameters, 1)
    rows = (
        (
            tensor.name,
            " × ".join(f"{side:,}" for side in tensor.shape),
            f"{tensor.count}" if tensor.count > 1 else "",
            f"{tensor.parameters:,}",
            f"{tensor.parameters / whole:.1%}",
        )
        for tensor in description.tensors
    )
    numbers = ("layers", "parameters", "share")
    _print_table(console, "Layers", ("parameter", "shape"), numbers, rows)
    sizes = []
    for memory in description.memory:
        cache = memory.cache_bytes_per_token
        cells = ["?", "?"] if cache is None else [f"{cache:,} B", size(cache * 2048 * 8)]
        sizes.append((memory.precision, size(memory.weight_bytes), *cells))
    numbers = ("weights", "key-value cache per token", "for 2048 tokens × batch 8")
    _print_table(console, "Memory", ("precision",), numbers, sizes)
    console.print(
        "int8, int4: linear layers' matrices at 1 and ½ byte (int4 with a bf16 scale per 64); "
        "embeddings, norms, output layer and cache stay bf16. Activations come on top.\n",
        style="dim",
    )
    adapters = (
        (", ".join(a.targets), f"{a.rank}", f"{a.parameters:,}", f"{a.parameters / whole:.3%}")
        for a in description.adapters
    )
    numbers = ("rank", "trainable", "of the model")
    _print_table(console, "Fine-tuning adapters", ("LoRA on",), numbers, adapters)


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """
    examples:
      nightgrid convert chatglm3-6b/ chatglm3-6b-native/
      nightgrid describe chatglm3-6b-native/       then name that directory as `model:` of a grid
    """
    parser.add_argument("source", type=Path, help="directory with config.json and the weights")
    parser.add_argument("destination", type=Path, help="directory to write; must not exist")
    parser.add_argument("--force", action="store_true", help="replace a model that is there")
    shared.add(parser, "--json")


def run_convert(args: argparse.Namespace) -> int:
    """Convert, showing progress, and say what was written."""
    begin = time.perf_counter()
    console, live = output.console(sys.stderr), sys.stderr.isatty()
    with Progress(console=console, transient=True, disable=not live) as bar:
        task = bar.add_task("converting", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        converted = convert(args.source, args.destination, force=args.force, progress=show)
    seconds = time.perf_counter() - begin
    extra = ["config.json", "generation_config.json"]
    extra += ["tokenizer.json", "tokenizer_config.json"] if converted.tokenizer else []
    missing = (
        "no tokenizer.model beside the weights, so no tokenizer was written: text prompts "
        "need one; put it there and convert again with --force"
    )
    return shared.print_answer(
        args,
        asdict(converted) | {"took_s": seconds},
        f"wrote {converted.path}: {converted.parameters:,} parameters, {size(converted.bytes)}",
        *(f"  {name}" for name in converted.weight_files),
        f"  {', '.join(extra)}",
        *([] if converted.tokenizer else [missing]),
        f"took {seconds:.1f} s; run it with  model: {converted.path}",
        default=str,
    )


def add_protect_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid protect llama/ llama-protected/ --key-file model.key --new-key
      nightgrid run grid.yaml --key-file model.key         with `model: llama-protected` in the grid

    The weight files are sealed by AES-256-GCM and are opened into memory only. config.json and the
    tokenizer stay readable. docs/security.md says what this does not protect against.
    """
    parser.add_argument("source", type=Path, help="a model's directory with safetensors files")
    parser.add_argument("destination", type=Path, help="directory to write; must not exist")
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", required=True, help="the key; mode 0600"
    )
    parser.add_argument(
        "--new-key", action="store_true", help="make a new key in that file, which must not exist"
    )
    shared.add(parser, "--json")


def run_protect(args: argparse.Namespace) -> int:
    """Protect, and say what was written."""
    failing = f"--new-key cannot make {args.key_file}"
    try:
        if args.new_key:
            encryption.write_key(args.key_file)
        key = encryption.read_key(args.key_file)
        failing = f"{args.source} cannot be protected"
        began = time.perf_counter()
        written, left_out = encryption.protect(args.source, args.destination, key)
        seconds = time.perf_counter() - began
    except OSError as error:
        raise BadConfiguration(f"{failing}: {error.strerror or error}") from error
    sealed = protected_files(args.destination)
    sealed_bytes = sum(file.stat().st_size for file in sealed)
    names = [file.name for file in sealed]
    report = {"path": str(args.destination), "protected": names, "bytes": sealed_bytes}
    unread = f"left out, since they are neither text nor safetensors: {', '.join(left_out)}"
    return shared.print_answer(
        args,
        report | {"left_out": left_out, "took_s": seconds},
        f"wrote {args.destination}: {len(sealed)} of {len(written)} files protected, "
        f"{size(sealed_bytes)} in {seconds:.1f} s",
        *([unread] if left_out else []),
        f"run it with  --key-file {args.key_file}; without that file nobody can open it",
    )


_BAR_WIDTH = 40
#: A hundred times AdvertiseGen's: gigabytes, and minutes.
MOST_EXAMPLES = 10_000_000


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """
    examples:
      nightgrid dataset lengths alpaca.jsonl                          in tokens: prompts, answers
      nightgrid dataset advertisegen AdvertiseGen/ --tiny tiny.json   the same, and 100 samples
      nightgrid dataset probe /data                                   MB/s, files/s where data lies
      nightgrid dataset synthetic made/ --count 1000                  a made-up twin to try it with
    """
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    what = "print the lengths of AdvertiseGen's train.json and dev.json; sample them by length"
    real = kinds.add_parser("advertisegen", help=what)
    real.add_argument("directory", type=Path, metavar="DIR", help="has train.json and dev.json")
    what = "print the lengths of any dataset (docs/data.md); sample it by length"
    of_any = kinds.add_parser("lengths", help=what)
    of_any.add_argument("dataset", metavar="DATASET", help="as `dataset:` of a grid names it")
    of_any.add_argument("--columns", default="", help="as in a grid: prompt=question, …")
    of_any.add_argument("--split", default="train", help="of a dataset of the hub (default: train)")
    of_any.add_argument("--revision", default="", help="of a dataset of the hub")
    of_any.add_argument("--subset", default="", help="of a dataset of the hub that has several")
    for kind in (real, of_any):
        kind.add_argument("--tiny", type=Path, metavar="OUT", help="write the sample to this file")
        kind.add_argument(
            "--count", type=_COUNT, default=100, help="examples in the sample (default: 100)"
        )
        kind.add_argument(
            "--tokenizer",
            metavar="MODEL",
            default="tiny-chatglm3",
            help="whose tokens are counted (default: tiny-chatglm3, the embedded model's)",
        )
        kind.add_argument("--force", action="store_true", help="overwrite OUT")
    what = "measure how fast the storage under a directory reads and writes"
    probe = kinds.add_parser("probe", help=what)
    probe.add_argument("directory", type=Path, metavar="DIR", help="where the data lies")
    what = "write a made-up train.json and dev.json of AdvertiseGen's shape"
    twin = kinds.add_parser("synthetic", help=what)
    twin.add_argument("directory", type=Path, metavar="DIR", help="where to write them")
    what = "examples in all (default: 10000)"
    twin.add_argument("--count", type=_COUNT, default=10_000, help=what)
    twin.add_argument("--force", action="store_true", help="overwrite files that are there")
    for kind in (real, of_any, probe, twin):
        shared.add(kind, "--json")


_COUNT = shared.number(int, 1, MOST_EXAMPLES, f"a whole number from 1 to {MOST_EXAMPLES:,}")


def run_dataset(args: argparse.Namespace) -> int:
    """Carry the command out; see ``_add_dataset_arguments``."""
    if args.kind == "synthetic":
        return _synthetic(args)
    return _probe(args) if args.kind == "probe" else _lengths(args)


def _lengths(args: argparse.Namespace) -> int:
    out = args.tiny / "tiny.json" if args.tiny and args.tiny.is_dir() else args.tiny
    if out is not None:
        _refuse_overwriting([out], args.force)
    if args.kind == "advertisegen":
        kind, name = "directory", str(args.directory)
        files = read_directory(args.directory)
    else:
        kind, name = "dataset", args.dataset
        if option := without_use(find_dataset(name).kind, vars(args)):
            raise NightgridError(f"{name} is no dataset of the hub; leave --{option} out")
        revision = Revisions().dataset(name, args.revision)
        reading = Reading(
            columns=args.columns, split=args.split, revision=revision, subset=args.subset
        )
        files = {name: load_examples(name, reading)}
    source = open_model(args.tokenizer)
    if source.entry.kind != "embedded":
        refuse_odd({}, Path(source.path))
    tokenizer = load_tokenizer(source)
    examples = [example for part in files.values() for example in part]
    lengths = token_lengths(examples, tokenizer)
    description = describe(files, lengths)
    written = None
    text = _text(name, args.tokenizer, description)
    if out is not None:
        sample = sample_by_length(examples, lengths, args.count)
        with _writing(out):
            write_json_lines(out, sample)
        written = len(sample)
        text += f"\n\n{written} examples at equal distance in total length -> {out}"
    report = asdict(description) | {kind: name, "tokenizer": args.tokenizer}
    report |= {"tiny": str(out) if out else None, "tiny_count": written}
    return shared.print_answer(args, report, text, indent=2, ensure_ascii=False)


def _synthetic(args: argparse.Namespace) -> int:
    if args.count < 2:
        raise NightgridError("--count must be at least 2: one example for each file")
    _refuse_overwriting([args.directory / name for name in ADVERTISEGEN_FILES], args.force)
    with _writing(args.directory):
        counts = write_synthetic(args.directory, args.count)
    listed = ", ".join(f"{name}: {count:,}" for name, count in counts.items())
    return shared.print_answer(
        args,
        {"directory": str(args.directory), "counts": counts, "synthetic": True},
        f"synthetic examples, of AdvertiseGen's shape and lengths -> {args.directory} ({listed})",
    )


def _probe(args: argparse.Namespace) -> int:
    large, small = storage.LARGE_BYTES, storage.SMALL_FILES
    with _writing(args.directory):
        speed = storage.measure(args.directory, large_bytes=large, small_files=small)
    rates = (
        ("one large file, read", f"{speed.read_bytes_per_s / 1e6:,.0f} MB/s"),
        ("one large file, written", f"{speed.write_bytes_per_s / 1e6:,.0f} MB/s"),
        ("small files, read", f"{speed.files_read_per_s:,.0f} files/s"),
        ("small files, written", f"{speed.files_written_per_s:,.0f} files/s"),
        ("sizes, renames, removals", f"{speed.operations_per_s:,.0f} operations/s"),
    )
    written = f"{speed.large_bytes / 1e6:,.0f} MB, and {speed.small_files:,} files of 4 KiB"
    cached = "reading may have come from memory: this system keeps what was written there"
    return shared.print_answer(
        args,
        asdict(speed),
        f"storage under {args.directory}",
        *(f"  {name:26}{rate:>22}" for name, rate in rates),
        f"of {written}; written until durable, nothing is left behind",
        *([] if speed.cache_dropped else [cached]),
        indent=2,
    )


def _refuse_overwriting(paths: list[Path], force: bool) -> None:
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise NightgridError(f"{', '.join(there)}: exists already; --force overwrites")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one for the user."""
    try:
        yield
    except OSError as error:
        raise NightgridError(f"cannot write {path}: {error.strerror or error}") from error


def _text(name: str, tokenizer: str, description: DatasetDescription) -> str:
    total = sum(description.counts.values())
    counts = ", ".join(f"{name} {count:,}" for name, count in description.counts.items())
    by_file = f" ({counts})" if len(description.counts) > 1 else ""
    lines = [f"{name}: {plural(total, 'example')}{by_file}"]
    if description.synthetic:
        lines.append("SYNTHETIC: these texts were made up by a program")
    lines.append(f"length in tokens of {tokenizer}, without the prompt layout")
    parts = {part: getattr(description, part) for part in ("input", "output", "total")}
    names = list(description.total.percentiles)
    lines += ["", f"{'':8}" + "".join(f"{name:>9}" for name in [*names, "mean"])]
    for part, lengths in parts.items():
        values = [*lengths.percentiles.values(), lengths.mean]
        lines.append(f"{part:8}" + "".join(f"{value:9.1f}" for value in values))
    for part, lengths in parts.items():
        lines += ["", f"{part} length"]
        most = max(bin.count for bin in lengths.bins)
        digits = len(str(lengths.bins[-1].high))
        for bin in lengths.bins:
            bar = "█" * -(-bin.count * _BAR_WIDTH // most)
            lines.append(f"  {bin.low:{digits}d}–{bin.high - 1:<{digits}d} {bin.count:>9,} {bar}")
    return "\n".join(lines)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The same prompts go through each engine on its card and through stock transformers on the CPU
    of the same node. Tokens and logits are compared; the largest logit difference is in the row. In
    16 bits texts may part at a near tie, where the reference hardly preferred its own token; that
    is agreement. A quantised model is another one: its difference is shown, not judged.

    examples:
      nightgrid verify grids/gaudi.yaml                   on the Ray cluster, before the first night
      nightgrid verify grids/smoke.yaml --emulate 1x1:HPU    the way, on an emulated card

    exit codes:
      0    all that ran agrees;  14  some numbers do not, or a job gave none
    """
    parser.add_argument(
        "grid", metavar="FILE", type=grid_path, help="the grid whose jobs are verified"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--emulate", metavar="SPEC", help="emulated cards, such as 1x1:HPU")
    where.add_argument("--address", metavar="HOST:PORT", help="the Ray cluster to run on")
    where.add_argument("--in-process", action="store_true", help="without Ray: for debuggers")
    shared.add(parser, "--set")
    parser.add_argument("--prompts", type=int, default=4, help="of the dataset (default: 4)")
    parser.add_argument("--tokens", type=int, default=16, help="after each prompt (default: 16)")
    parser.add_argument(
        "--batch-size", type=int, default=4, help="in which the engine gets them (default: 4)"
    )
    shared.add(parser, "--json")
    shared.add_results_argument(parser, of_a_grid=True)
    parser.add_argument(
        "--run",
        metavar="NAME",
        dest="run_name",  # `args.run` is the command itself
        help="the run that is verified, with its commits of the hub (default: the grid's name)",
    )


def run_verify(args: argparse.Namespace) -> int:
    """Run the verification grid and print its answers."""
    grid = grid_of_values(questions(args))
    # Run all, measured or not: drivers or libraries may have changed.
    options = shared.run_options(args, overrides=(), force=True, quiet=args.json)
    outcome = run_grid(grid, options, output.say_aside)
    _, measurements = read_summary(outcome.store)
    newest = {row.job_id: row for row in measurements if row.final}
    answers = verified(list(newest.values()))
    values = [asdict(one) for one in answers]
    shared.print_answer(args, values, _as_text(answers), indent=2, ensure_ascii=False)
    wrong = not outcome.result.finished or any(one.wrong for one in answers)
    return errors.DISAGREEMENT if wrong else errors.OK


def questions(args: argparse.Namespace) -> dict[str, Any]:
    """Content of the verification grid's file, with names of the hub at the commits of the grid's
    run, whose rows are verified; names without one are reported."""
    options = shared.run_options(args, name=args.run_name, emulate=None, resume=True)
    source = grid_of(args.grid, options)
    name = options.name or source.name
    if unknown := source.commits.keys() - commits_before(args.grid, options).keys():
        named = ", ".join(sorted(key.partition("/")[2] for key in unknown))
        output.say_aside(
            f"nightgrid verify: no run {name!r} was begun with {named}, so what is verified is the "
            "commit of today; --run and --results name another run"
        )
    grid = verification_grid(
        name,
        source.jobs(),
        open_engines=source.open_engines,
        prompts=args.prompts,
        output_tokens=args.tokens,
        batch_size=args.batch_size,
    )
    if grid is None:
        message = "no job of this grid generates text, so there is nothing to verify"
        raise GridError([Problem(file=str(args.grid), message=message)])
    return grid | ({"results": source.results} if source.results else {})


def _as_text(answers: list[Verified]) -> str:
    blocks = []
    for answer in answers:
        emulated = " (emulated)" if answer.emulated else ""
        settings = f", {answer.settings}" if answer.settings else ""
        lines = [
            f"{answer.model} {answer.precision} on {answer.accelerator}{emulated}, "
            f"engine {answer.engine}{settings}",
            f"  agrees: {answer.agrees}",
        ]
        if answer.largest_difference is not None:
            lines.append(
                f"  largest logit difference {answer.largest_difference:.3g}, where logits spread "
                f"by {answer.spread:.3g}; tokens compared: {answer.compared}"
            )
        if answer.note:
            lines.append(f"  {answer.note}")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)
