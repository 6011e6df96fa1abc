"""``nightgrid dataset``: lengths of a dataset and a small sample of it; a synthetic twin."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from orchestrator.core.errors import NightgridError
from orchestrator.host import output

if TYPE_CHECKING:
    from workloads.data.advertisegen import Description
    from workloads.data.examples import Example
    from workloads.data.lengths import Distribution

T = TypeVar("T")
_BAR_WIDTH = 40
#: A hundred times AdvertiseGen's: gigabytes, and minutes.
MOST_EXAMPLES = 10_000_000

EPILOG = """\
examples:
  nightgrid dataset lengths alpaca.jsonl                          in tokens: prompts, answers
  nightgrid dataset advertisegen AdvertiseGen/ --tiny tiny.json   the same, and 100 samples
  nightgrid dataset probe /data                                   MB/s, files/s where data lies
  nightgrid dataset synthetic made/ --count 1000                  a made-up twin to try things with
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``nightgrid dataset``."""
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    real = kinds.add_parser(
        "advertisegen",
        help="print the lengths of AdvertiseGen's train.json and dev.json; sample them by length",
    )
    real.add_argument("directory", type=Path, metavar="DIR", help="has train.json and dev.json")
    of_any = kinds.add_parser(
        "lengths",
        help="print the lengths of any dataset (docs/data.md); sample it by length",
    )
    of_any.add_argument("dataset", metavar="DATASET", help="as `dataset:` of a grid names it")
    of_any.add_argument("--columns", default="", help="as in a grid: prompt=question, …")
    of_any.add_argument("--split", default="train", help="of a dataset of the hub (default: train)")
    of_any.add_argument("--revision", default="", help="of a dataset of the hub")
    for kind in (real, of_any):
        kind.add_argument("--tiny", type=Path, metavar="OUT", help="write the sample to this file")
        kind.add_argument(
            "--count", type=_positive, default=100, help="examples in the sample (default: 100)"
        )
        kind.add_argument(
            "--tokenizer",
            metavar="MODEL",
            default="tiny-chatglm3",
            help="whose tokens are counted (default: tiny-chatglm3, the embedded model's)",
        )
        kind.add_argument("--json", action="store_true", help="print JSON instead of text")
        kind.add_argument("--force", action="store_true", help="overwrite OUT")
    probe = kinds.add_parser(
        "probe", help="measure how fast the storage under a directory reads and writes"
    )
    probe.add_argument("directory", type=Path, metavar="DIR", help="where the data lies")
    probe.add_argument("--json", action="store_true", help="print JSON instead of text")
    twin = kinds.add_parser(
        "synthetic", help="write a made-up train.json and dev.json of AdvertiseGen's shape"
    )
    twin.add_argument("directory", type=Path, metavar="DIR", help="where to write them")
    twin.add_argument(
        "--count", type=_positive, default=10_000, help="examples in all (default: 10000)"
    )
    twin.add_argument("--json", action="store_true", help="print JSON instead of text")
    twin.add_argument("--force", action="store_true", help="overwrite files that are there")


def run(args: argparse.Namespace) -> int:
    """Carry the command out; see ``add_arguments``."""
    if args.kind == "synthetic":
        return _synthetic(args)
    if args.kind == "probe":
        return _probe(args)
    if args.kind == "advertisegen":
        from workloads.data.advertisegen import read_directory

        return _lengths(
            args, "directory", str(args.directory), lambda: read_directory(args.directory)
        )
    from workloads.data.catalog import Reading, load_examples

    reading = Reading(columns=args.columns, split=args.split, revision=args.revision)
    return _lengths(
        args, "dataset", args.dataset, lambda: {args.dataset: load_examples(args.dataset, reading)}
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MOST_EXAMPLES:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not a whole number from 1 to {MOST_EXAMPLES:,}"
        )
    return value


def _lengths(
    args: argparse.Namespace,
    kind: str,
    name: str,
    read: Callable[[], dict[str, list[Example]]],
) -> int:
    from workloads.data import advertisegen

    out = args.tiny / "tiny.json" if args.tiny and args.tiny.is_dir() else args.tiny
    if out is not None:
        _refuse_overwriting([out], args.force)
    files = read()

    from workloads.models.loading import load_tokenizer, open_model

    tokenizer = load_tokenizer(open_model(args.tokenizer))
    lengths = advertisegen.measure_lengths(files, tokenizer)
    description = advertisegen.describe(files, lengths)
    written = None
    if out is not None:
        written = _writing(out, lambda: advertisegen.write_tiny(out, files, lengths, args.count))
    if args.json:
        report = asdict(description) | {kind: name}
        report |= {"tokenizer": args.tokenizer, "tiny": str(out) if out else None}
        output.say_json(report | {"tiny_count": written}, indent=2, ensure_ascii=False)
        return 0
    output.say(_text(name, args.tokenizer, description))
    if out is not None:
        output.say(f"\n{written} examples at equal distance in total length -> {out}")
    return 0


def _synthetic(args: argparse.Namespace) -> int:
    from workloads.data import advertisegen

    if args.count < 2:
        raise NightgridError("--count must be at least 2: one example for each file")
    names = advertisegen.ADVERTISEGEN_FILES
    _refuse_overwriting([args.directory / name for name in names], args.force)
    counts = _writing(
        args.directory, lambda: advertisegen.write_synthetic(args.directory, args.count)
    )
    if args.json:
        output.say_json({"directory": str(args.directory), "counts": counts, "synthetic": True})
        return 0
    listed = ", ".join(f"{name}: {count:,}" for name, count in counts.items())
    output.say(
        f"synthetic examples, of AdvertiseGen's shape and lengths -> {args.directory} ({listed})"
    )
    return 0


def _probe(args: argparse.Namespace) -> int:
    from workloads.data import storage

    found = _writing(
        args.directory,
        lambda: storage.measure(
            args.directory,
            large_bytes=storage.LARGE_BYTES,
            small_files=storage.SMALL_FILES,
        ),
    )
    if args.json:
        output.say_json(asdict(found), indent=2)
        return 0
    rates = (
        ("one large file, read", f"{found.read_bytes_per_s / 1e6:,.0f} MB/s"),
        ("one large file, written", f"{found.write_bytes_per_s / 1e6:,.0f} MB/s"),
        ("small files, read", f"{found.files_read_per_s:,.0f} files/s"),
        ("small files, written", f"{found.files_written_per_s:,.0f} files/s"),
        ("sizes, renames, removals", f"{found.operations_per_s:,.0f} operations/s"),
    )
    output.say(f"storage under {args.directory}")
    for name, rate in rates:
        output.say(f"  {name:26}{rate:>22}")
    size = f"{found.large_bytes / 1e6:,.0f} MB, and {found.small_files:,} files of 4 KiB"
    output.say(f"of {size}; written until durable, nothing is left behind")
    if not found.cache_dropped:
        output.say("reading may have come from memory: this system keeps what was written there")
    return 0


def _refuse_overwriting(paths: list[Path], force: bool) -> None:
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise NightgridError(f"{', '.join(there)}: exists already; --force overwrites")


def _writing(path: Path, act: Callable[[], T]) -> T:
    """The result of ``act``; what the file system refuses becomes an error for the user."""
    try:
        return act()
    except OSError as error:
        raise NightgridError(f"cannot write {path}: {error.strerror or error}") from error


def _text(name: str, tokenizer: str, description: Description) -> str:
    total = sum(description.counts.values())
    counts = ", ".join(f"{name} {count:,}" for name, count in description.counts.items())
    each = f" ({counts})" if len(description.counts) > 1 else ""
    lines = [f"{name}: {total:,} example{'s' * (total != 1)}{each}"]
    if description.synthetic:
        lines.append("SYNTHETIC: these texts were made up by a program")
    lines.append(f"length in tokens of {tokenizer}, without the prompt layout")
    parts = {
        "input": description.input,
        "output": description.output,
        "total": description.total,
    }
    names = list(description.total.percentiles)
    lines += ["", f"{'':8}" + "".join(f"{name:>9}" for name in [*names, "mean"])]
    for part, found in parts.items():
        values = [*found.percentiles.values(), found.mean]
        lines.append(f"{part:8}" + "".join(f"{value:9.1f}" for value in values))
    for part, found in parts.items():
        lines += ["", f"{part} length", *_histogram(found)]
    return "\n".join(lines)


def _histogram(found: Distribution) -> list[str]:
    most = max(b.count for b in found.bins)
    digits = len(str(found.bins[-1].high))
    return [
        f"  {b.low:{digits}d}–{b.high - 1:<{digits}d} {b.count:>9,} "
        f"{'█' * -(-b.count * _BAR_WIDTH // most)}"
        for b in found.bins
    ]
