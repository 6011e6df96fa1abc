"""Ten thousand hostile inputs (part of `make rehearsal`): directories of results, side files,
models, datasets, grids and command lines, generated from a seed. None may end in a traceback, hang
for ten seconds, end with an undocumented code, or change what it only reads.

    python tests/hostile/hostile.py [--inputs N] [--seed S] [--only NUMBER ...] [--output DIR]

Writes ``hostile.json``; exit code 1 if there is a finding. ``--only`` replays
inputs by their number and prints everything.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from hostile_worker import Told, run_cases  # noqa: E402

SEED = 20261122
#: What commands import on demand, so that the workers, which are forked, have it.
PRELOADED = (
    *("torch", "transformers", "duckdb", "mlflow", "pyarrow.parquet", "pyarrow.dataset"),
    *("rich.console", "typst", "workloads.models.describe"),
    *("orchestrator.on_ray.cluster", "orchestrator.on_ray.jobs", "orchestrator.report.html"),
    *("orchestrator.report.figures", "orchestrator.watch.server"),
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\w+)')


def signature(trouble: str) -> str:
    """The trait that findings of one cause share: the last place in our code, and the error."""
    frames = [f for f in _FRAME.findall(trouble) if re.search("/(orchestrator|workloads)/", f[0])]
    if trouble.startswith("hang"):  # faulthandler names the innermost frame first
        frames = frames[:1]
    last = trouble.strip().splitlines()[-1] if frames else trouble.strip().splitlines()[0]
    if not frames:
        return re.sub(r"/\S*/", "", re.sub(r"\d+", "N", last))[:100]
    path, number, name = frames[-1]
    where = re.sub(r".*/(orchestrator|workloads)/", r"\1/", path) + f":{number} {name}"
    what = "hang" if trouble.startswith("hang") else last.partition(":")[0]
    return f"{where}: {what}"


class Findings:
    """Inputs, exit codes of their commands, and findings by cause."""

    def __init__(self, *, loud: bool) -> None:
        self.loud = loud
        self.inputs: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.causes: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def add(self, number: int, about: tuple[str, str], results: list[Told]) -> None:
        kind, what = about
        self.inputs[kind] += 1
        for one in results:
            self.codes[str(one["code"])] += 1
            if self.loud:
                print(f"--- {number} {kind}: {what}\n{one['line']}\n{one['said']}{one['trouble']}")
                print(f"code {one['code']}, {one['seconds']:.2f} s")
            if one["trouble"]:
                cause = signature(one["trouble"])
                if cause not in self.causes and not self.loud:
                    print(f"{number} {kind}: {cause}", flush=True)
                self.causes[cause].append({"number": number, "kind": kind, "about": what, **one})
        if self.inputs.total() % 500 == 0 and not self.loud:
            print(f"{self.inputs.total():,} inputs, {len(self.causes)} causes", flush=True)

    def __str__(self) -> str:
        """Inputs by kind, exit codes, and the shortest finding of each cause."""
        lines = [f"inputs {dict(self.inputs)}", f"exit codes {dict(self.codes)}"]
        for cause, findings in sorted(self.causes.items(), key=lambda item: -len(item[1])):
            one = min(findings, key=lambda one: len(one["about"]) + len(str(one["line"])))
            lines.append(
                f"{cause}: {len(findings)} times; {one['number']}, {one['kind']}: "
                f"{one['about']!r:.90} {' '.join(one['line'])!r:.70}"
            )
        return "\n".join(lines)


def preload(names: Iterable[str] = PRELOADED) -> None:
    """Import in the first process what commands import, so that its forks have it."""
    import importlib

    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"without {name}: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, nargs="*", default=None)
    parser.add_argument("--output", type=Path, default=Path("rehearsal"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.time()
    preload()
    findings = Findings(loud=args.only is not None)
    numbers = args.only or list(range(args.first, args.first + args.inputs))
    try:
        run_cases(numbers, args.seed, findings.add)
    except KeyboardInterrupt:
        print("interrupted")
    print(findings)
    if args.only is None:
        args.output.mkdir(parents=True, exist_ok=True)
        figures = {
            "seed": args.seed,
            "wall_s": time.time() - began,
            "inputs": findings.inputs,
            "codes": findings.codes,
            "causes": findings.causes,
        }
        (args.output / "hostile.json").write_text(json.dumps(figures, indent=1))
    print(f"seed {args.seed}, {(time.time() - began) / 60:.1f} min")
    return 1 if findings.causes else 0


if __name__ == "__main__":
    sys.exit(main())
