"""``nightgrid protect SRC DST --key-file FILE``: a model whose weight files only a key opens."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from orchestrator.host import output

EPILOG = """\
examples:
  nightgrid protect llama/ llama-protected/ --key-file model.key --new-key
  nightgrid run grid.yaml --key-file model.key         with `model: llama-protected` in the grid

The weight files are sealed by AES-256-GCM and are opened into memory only. config.json and the
tokenizer stay readable. docs/security.md says what this does not protect against.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("source", type=Path, help="a model's directory with safetensors files")
    parser.add_argument("destination", type=Path, help="directory to write; must not exist")
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", required=True, help="the key; mode 0600"
    )
    parser.add_argument(
        "--new-key", action="store_true", help="make a new key in that file, which must not exist"
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Protect, and say what was written."""
    from workloads.base import BadConfiguration
    from workloads.models import protection
    from workloads.models.checkpoint_files import protected_files

    if args.new_key:
        try:
            protection.write_key(args.key_file)
        except OSError as error:
            raise BadConfiguration(
                f"--new-key cannot make {args.key_file}: {error.strerror}"
            ) from error
    key = protection.read_key(args.key_file)
    began = time.perf_counter()
    try:
        written, left_out = protection.protect(args.source, args.destination, key)
    except OSError as error:
        raise BadConfiguration(f"{args.source} cannot be protected: {error}") from error
    seconds = time.perf_counter() - began
    sealed = protected_files(args.destination)
    size = sum(file.stat().st_size for file in sealed)
    if args.json:
        names = [file.name for file in sealed]
        found = {"path": str(args.destination), "protected": names, "bytes": size}
        found |= {"left_out": left_out}
        output.say_json(found | {"took_s": seconds})
        return 0
    output.say(
        f"wrote {args.destination}: {len(sealed)} of {len(written)} files protected, "
        f"{size / 1e9:.2f} GB in {seconds:.1f} s"
    )
    if left_out:
        output.say(f"left out, since they are neither text nor safetensors: {', '.join(left_out)}")
    output.say(f"run it with  --key-file {args.key_file}; without that file nobody can open it")
    return 0
