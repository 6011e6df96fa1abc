"""``nightgrid convert SRC DST``: ChatGLM3's original layout -> a directory transformers loads."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.host import output

EPILOG = """\
examples:
  nightgrid convert chatglm3-6b/ chatglm3-6b-native/
  nightgrid describe chatglm3-6b-native/       then name that directory as `model:` of a grid
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("source", type=Path, help="directory with config.json and the weights")
    parser.add_argument("destination", type=Path, help="directory to write; must not exist")
    parser.add_argument("--force", action="store_true", help="replace a model that is there")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Convert, showing progress, and say what was written."""
    from workloads.models.conversion import convert

    begin = time.perf_counter()
    converted = convert(
        args.source, args.destination, force=args.force, progress=_progress_printer()
    )
    seconds = time.perf_counter() - begin
    if args.json:
        output.say_json(dataclasses.asdict(converted) | {"took_s": seconds}, default=str)
        return 0
    output.say(
        f"wrote {converted.path}: {converted.parameters:,} parameters, {_gb(converted.bytes)}"
    )
    for name in converted.weight_files:
        output.say(f"  {name}")
    extra = ["config.json", "generation_config.json"]
    extra += ["tokenizer.json", "tokenizer_config.json"] if converted.tokenizer else []
    output.say(f"  {', '.join(extra)}")
    if not converted.tokenizer:
        output.say(
            "no tokenizer.model beside the weights, so no tokenizer was written: text prompts "
            "need one; put it there and convert again with --force"
        )
    output.say(f"took {seconds:.1f} s; run it with  model: {converted.path}")
    return 0


def _progress_printer() -> Callable[[int, int], None]:
    """A bar that rewrites itself in a terminal; a line every tenth elsewhere."""
    live = sys.stderr.isatty()
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        step = percent if live else percent // 10 * 10
        if step == shown:
            return
        shown = step
        text = f"converting {step:3d} %  {_gb(done)} of {_gb(total)}"
        end = "\n" if not live or done == total else ""
        output.emit((f"\r{text}" if live else text) + end, sys.stderr)

    return show


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
