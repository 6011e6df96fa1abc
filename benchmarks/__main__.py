"""``python -m benchmarks [NAME ...]``: run, write results as JSON, generate docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.contender import ROOT, exit_on_signals
from benchmarks.figures import Outcome
from benchmarks.install_peers import OPTIMUM
from benchmarks.machine import code, cores_used, machine, versions, wanted_and_stolen
from benchmarks.page import page, table
from benchmarks.setting import Setting, Takes

#: In this order; each is a module with TITLE, TAKES_S and run(setting).
NAMES = (
    "command_line",
    "reports",
    "scheduling",
    "hard_scheduling",
    "estimates",
    "measuring",
    "startup",
    "orchestration",
    "grid",
    "finetuning",
)
#: These need no environment of peers.
WITHOUT_PEERS = ("command_line", "reports", "scheduling", "hard_scheduling", "estimates")
RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    """Run the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; or page")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether they work")
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller: under 8 minutes for all"
    )
    parser.add_argument("--turns", type=int, default=2, help="turns of each contender (default 2)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where JSON files go")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".venv-bench", help="environment of the peers"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        help="keep in DIR/NAME what is measured; left out, it is kept only if the benchmark fails",
        metavar="DIR",
    )
    args = parser.parse_args()
    if args.quick and args.results == RESULTS:
        args.results = RESULTS.with_name("quick-results")  # the page is of whole runs alone
    unknown = set(args.names) - {*NAMES, "page"}
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there is {', '.join(NAMES)}")
    peers = args.peers.absolute()  # contenders run elsewhere
    python, peers_python = _python_of(peers)
    _, optimum_python = _python_of(peers / OPTIMUM)
    alone = bool(args.names) and {*args.names} <= {*WITHOUT_PEERS, "page"}
    if peers_python is None and not args.smoke and not alone:
        parser.error(f"no {python}; make it with: python -m benchmarks.install_peers {args.peers}")
    failed = []
    if args.names != ["page"]:
        args.results.mkdir(parents=True, exist_ok=True)
        failed = _run_all(args, peers_python, optimum_python)
    if not (args.smoke or args.quick) or args.names == ["page"]:
        args.page.write_text(page(_stored(args.results), NAMES), encoding="utf-8")
        print(f"wrote {args.page}")
    for name, reason in failed:
        print(f"FAILED {name}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _python_of(environment: Path) -> tuple[Path, Path | None]:
    """The path of its Python; and again if it is there."""
    python = environment / "bin" / "python"
    return python, python if python.exists() else None


def _run_all(
    args: argparse.Namespace,
    peers_python: Path | None,
    optimum_python: Path | None,
) -> list[tuple[str, str]]:
    failed = []
    found = versions(peers_python, optimum_python)
    print(json.dumps(machine() | found | {"code": code(ROOT)}, indent=1))
    run = _now()
    names = args.names or [name for name in NAMES if not args.quick or takes_s(name, quick=True)]
    if not args.smoke:
        print("\n".join(announced(names, quick=args.quick)), flush=True)
    for name in names:
        if args.scratch is None:
            scratch = Path(tempfile.mkdtemp(prefix=f"nightgrid-{name}-"))
        else:
            scratch = args.scratch.absolute() / name
            scratch.mkdir(parents=True, exist_ok=True)
        setting = Setting(
            scratch=scratch,
            peers_python=peers_python,
            optimum_python=optimum_python,
            smoke=args.smoke,
            quick=args.quick,
            turns=args.turns,
        )
        try:
            state = code(ROOT)
            told = run_one(name, setting) | {"machine": machine(), "versions": found}
            told |= {"code": state, "run": run}
        except Exception as error:
            traceback.print_exc()
            failed.append((name, f"{error!r:.300}; what it measured is in {scratch}"))
            continue
        if args.scratch is None:
            shutil.rmtree(scratch)
        (args.results / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
        print(table([told]), flush=True)
    return failed


def run_one(name: str, setting: Setting) -> dict[str, Any]:
    module = importlib.import_module(f"benchmarks.{name}")
    print(f"{name}: {module.TITLE}", flush=True)
    others = 0.0 if setting.smoke else cores_used()
    began = time.perf_counter()
    wanted, stolen = wanted_and_stolen()
    lines, facts = module.run(setting)
    took_s = time.perf_counter() - began
    expected_s = takes_s(name, quick=setting.quick)
    print(f"{name} took {took_s:.0f} s; {expected_s:.0f} s on quiet cores", flush=True)
    wanted, stolen = (a - b for a, b in zip(wanted_and_stolen(), (wanted, stolen), strict=True))
    others = 0.0 if setting.smoke else max(others, cores_used())
    outcome = Outcome(
        name=name,
        title=module.TITLE,
        about=_about(module),
        lines=tuple(lines),
        facts=facts,
        took_s=took_s,
        smoke=setting.smoke,
        quick=setting.quick,
        others=others,
        stolen=stolen / wanted if wanted else 0.0,
    )
    return outcome.to_json() | {"finished_at": _now()}


def takes_s(name: str, *, quick: bool) -> float:
    """Seconds that a benchmark takes on two quiet cores; 0 where this size leaves it out."""
    takes: Takes = importlib.import_module(f"benchmarks.{name}").TAKES_S
    return takes.of(quick=quick)


def announced(names: Sequence[str], *, quick: bool) -> Iterator[str]:
    """Lines that say how long each takes, and all together."""
    seconds = {name: takes_s(name, quick=quick) for name in names}
    yield f"about {sum(seconds.values()) / 60:.0f} minutes on two quiet cores:"
    for name, each_s in seconds.items():
        yield f"  {name:16} {each_s:4.0f} s"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _about(module: ModuleType) -> str:
    """The first paragraph of a benchmark's docstring, as Markdown."""
    return (inspect.getdoc(module) or "").partition("\n\n")[0].replace("``", "`")


def _stored(results: Path) -> list[dict[str, Any]]:
    files = [results / f"{name}.json" for name in NAMES]
    return [json.loads(file.read_text()) for file in files if file.is_file()]


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
