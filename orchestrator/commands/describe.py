"""``nightgrid describe MODEL``: what a model is made of, without loading its weights."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.options import whole_number
from orchestrator.host import output

if TYPE_CHECKING:
    from rich.console import Console

    from workloads.models.description import Description

EPILOG = """\
examples:
  nightgrid describe tiny-chatglm3
  nightgrid describe chatglm3-6b/config.json --svg chatglm3.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "model", help="an embedded model, a directory, a config.json (ChatGLM3's own too), a hub id"
    )
    parser.add_argument("--lora-rank", type=whole_number, default=8, metavar="R", help="default: 8")
    parser.add_argument("--json", action="store_true", help="everything, for machines")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--pptx", type=Path, metavar="FILE", help="write it as a slide")


def run(args: argparse.Namespace) -> int:
    """Describe, then print."""
    from orchestrator.report.run_report import write_aside
    from workloads.models.description import describe_model
    from workloads.models.drawing import draw_svg
    from workloads.models.picture import picture_of
    from workloads.models.slide import draw_slide

    description = describe_model(args.model, lora_rank=args.lora_rank)
    title = f"{description.model}: {description.parameters:,} parameters"
    for file, drawn in ((args.svg, draw_svg), (args.pptx, draw_slide)):
        if file is not None:
            write_aside(file, drawn(picture_of(description), title))
            output.say_aside(f"wrote {file}")
    if args.json:
        output.say_json(dataclasses.asdict(description), indent=2, ensure_ascii=False)
        return 0
    width = None if sys.stdout.isatty() else 110  # a pipe has no width; tables must not fold
    print_description(description, output.console(highlight=False, width=width))
    return 0


def print_description(description: Description, console: Console) -> None:
    """All parts, for people."""
    from rich.text import Text

    from workloads.models.picture import draw_text, picture_of

    random = "  (random weights: its texts mean nothing)" if description.random_weights else ""
    name = description.architecture.name
    console.print(Text.assemble((description.model, "bold"), f"  {name}{random}"))
    console.print(f"{description.parameters:,} parameters\n")
    for line in draw_text(picture_of(description)):
        console.print(line, markup=False, no_wrap=True, overflow="ignore", crop=False)
    console.print()
    _print_layers(description, console)
    _print_memory(description, console)
    _print_adapters(description, console)
    _print_prompt(description, console)


def _print_layers(description: Description, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("parameter", "shape", title="Layers", title_justify="left")
    for heading in ("layers", "parameters", "share"):
        table.add_column(heading, justify="right")
    for tensor in description.tensors:
        share = tensor.parameters / max(description.parameters, 1)
        shape = " × ".join(f"{side:,}" for side in tensor.shape)
        count = f"{tensor.count}" if tensor.count > 1 else ""
        table.add_row(Text(tensor.name), shape, count, f"{tensor.parameters:,}", f"{share:.1%}")
    console.print(table)


def _print_memory(description: Description, console: Console) -> None:
    from rich.table import Table

    table = Table("precision", title="Memory", title_justify="left")
    for heading in ("weights", "key-value cache per token", "for 2048 tokens × batch 8"):
        table.add_column(heading, justify="right")
    for memory in description.memory:
        cache = memory.cache_bytes_per_token
        cells = ["?", "?"] if cache is None else [f"{cache:,} B", size(cache * 2048 * 8)]
        table.add_row(memory.precision, size(memory.weight_bytes), *cells)
    console.print(table)
    console.print(
        "int8, int4: linear layers' matrices at 1 and ½ byte (int4 with a bf16 scale per 64); "
        "embeddings, norms, output layer and cache stay bf16. Activations come on top.\n",
        style="dim",
    )


def _print_adapters(description: Description, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("LoRA on", title="Fine-tuning adapters", title_justify="left")
    for heading in ("rank", "trainable", "of the model"):
        table.add_column(heading, justify="right")
    for adapter in description.adapters:
        share = adapter.parameters / max(description.parameters, 1)
        table.add_row(
            Text(", ".join(adapter.targets)),
            str(adapter.rank),
            f"{adapter.parameters:,}",
            f"{share:.3%}",
        )
    console.print(table)


def _print_prompt(description: Description, console: Console) -> None:
    prompt = description.prompt
    console.print("Prompt", style="italic")
    console.print(f"  layout   {prompt.layout}", markup=False)
    if prompt.ids:
        console.print(f"  example  {prompt.example}", markup=False)
        console.print(f"  tokens   {' '.join(prompt.tokens)}", markup=False)
        console.print(f"  ids      {' '.join(map(str, prompt.ids))}", markup=False)
    if prompt.note:
        console.print(f"  note     {prompt.note}", markup=False)


def size(count: int) -> str:
    """Bytes in the unit that reads best, decimal."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
