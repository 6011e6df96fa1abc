"""The walls of the house: who may import whom."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from source_tree import ROOT, imported, modules, syntax

from workloads.devices import own_devices
from workloads.engines import ENGINES

PRODUCT = ("orchestrator", "workloads")
HEAVY = ("torch", "transformers", "ray", "pyarrow")

#: The rooms, bottom to top; an import goes down or stays in its room. Names of rooms that are still
#: to be moved stand beside those that they move to.
LAYERS = {
    "orchestrator": (
        ("util", "host"),
        ("core",),
        ("grid",),
        ("scheduler",),
        ("search", "planning"),  # planning may simulate the scheduler
        ("store", "results"),
        ("analysis",),
        ("worker",),
        ("on_ray",),
        ("report", "trackers"),
        ("watch", "watching"),
        ("driver", "doctor"),
        ("cli", "commands", "api", "__main__"),
    ),
    "workloads": (
        ("util",),
        ("base", "settings", "registry", "tasks"),
        ("devices",),
        ("bench", "metrics"),
        ("data", "inspection"),
        ("models",),
        ("training", "parallel", "techniques"),
        ("compression",),
        ("engines",),
        ("serving",),  # and the workloads: all that stands in no other room
    ),
}
#: Rooms that are pure: no clock, disk, torch or Ray.
PURE = ("core", "grid", "scheduler", "analysis", "planning")
#: Libraries that may be imported inside functions, since they are large, optional or of one system.
LAZY = {
    *(
        "torch",
        "transformers",
        "ray",
        "pandas",
        "pyarrow",
        "duckdb",
        "numpy",
        "scipy",
        "rich",
        "yaml",
    ),
    *("datasets", "diffusers", "optimum", "openvino", "openvino_genai", "onnx", "onnxruntime"),
    *("vllm", "mlflow", "wandb", "fsspec", "huggingface_hub", "pynvml", "habana_frameworks"),
    *("sentence_transformers", "tokenizers", "safetensors", "PIL", "cryptography", "peft", "trl"),
    *("bitsandbytes", "xformers", "torchao", "evaluate", "psutil", "orjson", "flash_attn"),
    *("pptx", "liger_kernel", "typst", "jinja2", "polars", "auto_round", "neural_compressor"),
    *("nncf", "sentencepiece", "gguf", "onnx_ir"),
}

#: What is still to be mended; each number may only fall.
MOST_UPWARD = 7
MOST_LAZY = 243
MOST_LONG_FILES = 0
MOST_PRIVATE_NAMES = 13
MOST_LINES = 700
#: Words that only this project's builders understood; the words of the field replace them.
PRIVATE_WORDS = {
    *("told", "found", "asked", "held", "kept", "begun", "passport", "leftovers", "parcels"),
    *("predecessors", "afar", "gone", "wanted", "each", "whoever", "earlier", "aftermath"),
    *("contests", "spilled", "ahead", "anchors", "shares", "verdicts", "stops"),
}


def importers(paths: Iterable[Path], barred: set[str]) -> list[str]:
    """The modules, of these, that import something of a barred package."""
    return [
        str(path.relative_to(ROOT))
        for path in paths
        if any(name.split(".")[0] in barred for name in imported(path))
    ]


def test_workloads_know_nothing_of_orchestrator_or_ray() -> None:
    assert importers(modules("workloads"), {"orchestrator", "ray"}) == []


def layer_of(name: str) -> tuple[str, int] | None:
    """The package of a module and its height in it; None for a package itself."""
    package, _, rest = name.partition(".")
    if package not in LAYERS or not rest:
        return None
    room = rest.split(".")[0]
    heights = [at for at, rooms in enumerate(LAYERS[package]) if room in rooms]
    if not heights and package == "orchestrator":
        raise AssertionError(f"{name} stands in no room: add orchestrator/{room} to LAYERS")
    return package, heights[0] if heights else len(LAYERS[package]) - 1


def upward(package: str) -> list[str]:
    """The imports that go up, those inside functions included; names of a package's
    ``__init__`` count as the package."""
    files = {module_name(path) for top in PRODUCT for path in modules(top)}
    arrows = []
    for path in modules(package):
        here = layer_of(module_name(path))
        for name in sorted(imported(path) & files) if here is not None else ():
            there = layer_of(name)
            if there is not None and there[0] == here[0] and there[1] > here[1]:
                arrows.append(f"{module_name(path)} -> {name}")
    return arrows


def test_imports_go_down_the_layers() -> None:
    arrows = [arrow for package in PRODUCT for arrow in upward(package)]
    assert len(arrows) <= MOST_UPWARD, "\n".join(arrows)


def lazy_imports(path: Path) -> list[str]:
    """The modules that a file imports inside functions although they are not large."""
    names = []
    for function in syntax(path.read_text(encoding="utf-8")):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    names += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.append(node.module)
    return [f"{path.relative_to(ROOT)}: {n}" for n in set(names) if n.split(".")[0] not in LAZY]


def test_only_large_libraries_are_imported_inside_functions() -> None:
    lazy = [each for package in PRODUCT for path in modules(package) for each in lazy_imports(path)]
    assert len(lazy) <= MOST_LAZY, "\n".join(sorted(lazy))


def test_no_file_is_too_long() -> None:
    lengths = {p: len(p.read_text().splitlines()) for top in PRODUCT for p in modules(top)}
    long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MOST_LINES}
    assert len(long) <= MOST_LONG_FILES, long


def test_names_of_files_and_classes_are_the_fields_own_words() -> None:
    names = []
    for path in (path for package in PRODUCT for path in modules(package)):
        place = str(path.relative_to(ROOT))
        names += [(place, word) for word in path.stem.split("_")]
        for node in syntax(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.ClassDef):
                words = re.findall(r"HeldOut|[A-Z][a-z]+|[a-z]+", node.name)
                names += [(f"{place}: {node.name}", word.casefold()) for word in words]
    private = sorted({place for place, word in names if word in PRIVATE_WORDS})
    assert len(private) <= MOST_PRIVATE_NAMES, "\n".join(private)


def test_only_the_ray_modules_import_ray() -> None:
    others = [path for path in modules("orchestrator") if path.parent.name != "on_ray"]
    assert importers(others, {"ray"}) == []


def test_pure_rooms_import_neither_torch_nor_ray() -> None:
    pure = [path for room in PURE for path in modules(f"orchestrator/{room}")]
    assert len(pure) > 30
    assert importers(pure, {"torch", "transformers", "ray"}) == []


def test_device_branches_live_in_the_device_classes() -> None:
    words = ("torch.cuda.", "torch.hpu.", "habana_frameworks")
    others = [path for path in modules("workloads") if path.parent.name != "devices"]
    sources = {path: path.read_text(encoding="utf-8") for path in others}
    assert [path for path, text in sources.items() if any(word in text for word in words)] == []


#: Methods that look a text up, or compare with it.
WORDS_OF_TORCH = {"cpu", "graph"}  # ``tensor.cpu()``, ``torch.cuda.graph()``
LOOKING = {"get", "pop", "setdefault", "startswith", "endswith", "index", "count"}


def names_that_decide(source: str, names: set[str]) -> set[str]:
    """The names, of these, that are compared with something, looked up, or keys; and attributes
    of these names. Where a tensor lies is torch's to say: ``tensor.device.type == "cpu"``."""
    found: set[str] = set()

    def look(*nodes: ast.AST | None) -> None:
        for node in nodes:
            for inner in ast.walk(node) if node is not None else ():
                if isinstance(inner, ast.Constant) and inner.value in names:
                    found.add(str(inner.value))

    for node in syntax(source):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if not any(isinstance(each, ast.Attribute) and each.attr == "type" for each in sides):
                look(*(each for each in sides if not isinstance(each, ast.Call)))
        elif isinstance(node, ast.Dict):
            look(*node.keys)
        elif isinstance(node, ast.DictComp):
            look(node.key)
        elif isinstance(node, ast.Subscript):
            look(node.slice)
        elif isinstance(node, ast.MatchValue):
            look(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            look(*(node.args if node.func.attr in LOOKING else ()))
        elif isinstance(node, ast.Attribute) and node.attr in names - WORDS_OF_TORCH:
            found.add(node.attr)
    return found


def deciding(names: set[str], own_folder: str) -> dict[str, set[str]]:
    """The names that decide in each file of the product, that of their own declaration aside."""
    found = {}
    for path in (path for package in PRODUCT for path in modules(package)):
        own = path.stem.replace("_", "-") if path.parent == ROOT / own_folder else ""
        others = names - {own, own.upper()}
        if decided := names_that_decide(path.read_text(), others):
            found[str(path.relative_to(ROOT))] = decided
    return found


@pytest.mark.slow
def test_no_devices_name_decides_anything() -> None:
    names = {name for spec in own_devices() for name in (spec.name, spec.accelerator)}
    found = deciding(names, "workloads/devices")
    engines = {name for name in found if name.startswith("workloads/engines/")}
    assert found.keys() == engines
    assert not found.keys() & {f"workloads/engines/{name}.py" for name in ("__init__", "base")}


@pytest.mark.slow
def test_no_engines_name_decides_anything() -> None:
    found = deciding(set(ENGINES.own), "workloads/engines")
    assert found.pop("workloads/registry.py") == set(ENGINES.own)  # where each is declared
    assert found == {"workloads/engines/optimum_habana/__init__.py": {"transformers"}}


@pytest.mark.parametrize(
    "source",
    [
        'if device == "hpu": pass',
        'if "hpu" != device: pass',
        'if device in ("cuda", "hpu"): pass',
        'TABLE = {"hpu": 1}',
        'TABLE = {("fp8", "hpu"): 1}',
        'TABLE = {(each, "hpu"): 1 for each in precisions}',
        'TABLE["hpu"]',
        'TABLE.get("hpu")',
        'device.startswith("hpu")',
        "kind is Accelerator.hpu",
        'match device:\n    case "hpu": pass',
    ],
)
def test_every_way_to_decide_by_a_name_is_seen(source: str) -> None:
    assert "hpu" in names_that_decide(source, {"hpu", "cuda"})
    assert not names_that_decide(source.replace("hpu", "x").replace("cuda", "y"), {"hpu", "cuda"})
    assert not names_that_decide('tensor.device.type == "cpu" or tensor.cpu()', {"cpu"})
    assert not names_that_decide('log(f"{device} is no hpu")', {"hpu"})


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom orchestrator.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "sys.exit(','.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "nightgrid run" in done.stdout


#: What a plan of text generation has no use for, beside the large packages.
UNPLANNED = ("asyncio", "orchestrator.on_ray")


def test_a_plan_loads_only_what_it_needs() -> None:
    code = (
        "import sys\nfrom orchestrator.cli.main import main\n"
        "main(['plan', 'grids/smoke.yaml', '--results', 'none-here'])\n"
        f"loaded = [m for m in {(*HEAVY, *UNPLANNED)!r} if m in sys.modules]\n"
        "sys.exit(', '.join(loaded) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "job_id" in done.stdout


#: Every function that may read the time of day, and what for. A duration, a timeout or a backoff
#: is none of these: the time of day is set now and then (``orchestrator/util/host.py``).
TIME_OF_DAY = {
    "orchestrator/util/host.py": {
        "Interval": "where an interval of a row begins; its length is of the steady clock",
        "CallAt.__init__": "a deadline is a time of day",
    },
    "orchestrator/cli/options.py": {
        "ends_at": "the deadline of a budget that begins now",
        "_deadline": "08:00 is the next one",
    },
    "orchestrator/cli/run.py": {"_report_in_any_case": "a deadline is a time of day"},
    "orchestrator/cli/plan.py": {
        "run_plan": "how far a deadline is away, for people",
        "run_simulate": "how far a deadline is away, for people",
    },
    "orchestrator/cli/runs.py": {
        "run_runs": "how old a driver's last word is, which may be on another host",
        "job_lines": "how old a time of Ray's is",
        "run_json": "how old a driver's last word is, which may be on another host",
        "run_lines": "how old a driver's last word is, which may be on another host",
    },
    "orchestrator/driver/loop.py": {"Driver": "for notes, the status and the deadline"},
    "orchestrator/watch/live.py": {
        "PlainView.line": "the time of day before each line of a log",
        "TerminalView.line": "the time of day before each line",
    },
    "orchestrator/on_ray/gcs.py": {
        "Gcs.trouble": "since when the control store is silent, for people",
    },
    "orchestrator/on_ray/jobs.py": {"new_submission_id": "a name that people can place"},
    "orchestrator/on_ray/examination.py": {
        "NodeExaminer.now": "times of day of hosts are compared",
        "clock_offset": "times of day of hosts are compared",
    },
    "orchestrator/util/output.py": {
        "GuardedFile.write": "since when output is lost, for people",
        "GuardedFile._losses": "since when output was lost, for people",
    },
    "orchestrator/report/run_report.py": {
        "_summarized": "how old a driver's last word is, which may be on another host",
    },
    "orchestrator/store/lock.py": {
        "Holder.this_process": "since when a run is held, for people",
        "Holder.__str__": "since when a run is held, for people",
        "RunLock._refusal": "since when a run is held, for people",
        "is_held": "how old a sign of life of a driver on another host is",
    },
    "orchestrator/driver/plan.py": {
        "forecast_of": "how far a deadline is away",
    },
    "orchestrator/driver/recovery.py": {"recover_outcomes": "when a row was recorded"},
    "orchestrator/on_ray/outcomes.py": {
        "_age_s": "how old a file is, by its own time",
    },
    "orchestrator/driver/run.py": {
        "drive": "when a card was checked",
        "drive.to_measurement": "when a row was recorded",
        "_session": "when a run came to a cluster's queue, which runs on several hosts share",
        "run_grid": "how much of the time until a deadline is the reserve",
    },
    "orchestrator/driver/options.py": {
        "RunOptions.under_way_s": "how long ago the command was typed, before there was a driver",
    },
    "orchestrator/driver/supervisor.py": {
        "Supervisor": "when the first driver began, for its notice",
        "Supervisor.run": "how far a deadline is away",
        "Supervisor._wait": "a deadline is a time of day",
    },
    "orchestrator/watch/state.py": {
        "RunFeed.__init__": "how old the driver's last word was when the page was opened",
    },
}
_READS = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}


def readers_of_the_time_of_day(source: str) -> set[str]:
    """The functions and classes, by qualified name, in which the time of day is named: called,
    or handed over as a clock."""
    found: set[str] = set()

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if node.attr in _READS.get(owner, ()):
                found.add(".".join(scope) or "<module>")
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            names = {alias.name for alias in node.names} & _READS["time"]
            found.update(f"from time import {name}" for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    visit(syntax(source)[0], ())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("package", ["orchestrator", "workloads"])
def test_the_time_of_day_is_read_only_where_somebody_wants_to_know_it(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): readers
        for path in modules(package)
        if (readers := readers_of_the_time_of_day(path.read_text()))
    }
    allowed = {file: set(by) for file, by in TIME_OF_DAY.items() if file.startswith(package)}
    assert found == allowed


def test_every_way_to_read_the_time_of_day_is_seen() -> None:
    source = """
import datetime, time
from time import time_ns
LIMIT = time.time() + 5
def late(): return datetime.datetime.now() > then or datetime.date.today()
class Poll:
    clock: object = time.time
    def due(self): return time.monotonic() > self.at
    def stamp(self): return time.strftime("%H")
"""
    assert readers_of_the_time_of_day(source) == {
        "from time import time_ns",
        "<module>",
        "late",
        "Poll",
        "Poll.stamp",
    }


def test_no_module_imports_in_a_circle() -> None:
    files = {module_name(path): path for top in PRODUCT for path in modules(top)}
    arrows = {}
    for name, path in files.items():
        found = imported(path) & files.keys()
        # `from package import module` is of the module; the package's own file says nothing here.
        packages = {each for each in found if any(o.startswith(f"{each}.") for o in found)}
        arrows[name] = found - packages - {name}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


def module_name(path: Path) -> str:
    """``orchestrator/grid/__init__.py`` -> ``orchestrator.grid``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
