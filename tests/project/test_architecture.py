"""The walls of the house: who may import whom, who may read the time of day, and words of names."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from source_tree import PRODUCT, ROOT, imported, modules, nodes_of, place, syntax

from workloads.devices import own_devices
from workloads.engines import ENGINES

#: The rooms, bottom to top; an import goes down or stays in its room.
LAYERS = {
    "orchestrator": (
        ("util",),
        ("core",),
        ("grid",),
        ("scheduler",),
        ("search", "planning"),  # planning may simulate the scheduler
        ("store",),
        ("analysis",),
        ("worker",),
        ("on_ray",),
        ("report", "trackers", "software"),
        ("watch",),
        ("driver", "doctor"),
        ("cli", "api", "__main__"),
    ),
    "workloads": (
        ("util",),
        ("base", "settings", "registry"),
        ("devices",),
        ("bench",),
        ("data", "inspection"),
        ("models",),
        ("training",),
        ("compression",),
        ("engines",),
        ("serving",),  # and the workloads: all that stands in no other room
    ),
}
#: Rooms that are pure: no clock, disk, torch or Ray.
PURE = ("core", "grid", "scheduler", "search", "analysis", "planning")
#: Libraries that may be imported inside functions, since they are large, optional or of one system.
LAZY = """
torch transformers ray pandas pyarrow duckdb numpy scipy rich yaml datasets diffusers optimum
openvino openvino_genai onnx onnxruntime vllm mlflow wandb fsspec huggingface_hub pynvml
habana_frameworks sentence_transformers tokenizers safetensors PIL cryptography peft trl
bitsandbytes xformers torchao evaluate psutil orjson flash_attn pptx liger_kernel typst jinja2
polars auto_round neural_compressor nncf sentencepiece gguf onnx_ir
"""
#: Words that only this project's builders understood; the words of the field replace them.
PRIVATE_WORDS = """
told found asked held kept begun passport leftovers parcels predecessors afar gone wanted each
whoever earlier aftermath contests spilled ahead anchors shares verdicts stops
"""

#: What is still to be mended; each number may only fall.
MOST_UPWARD = 7
MOST_LAZY = 86
MOST_PRIVATE_NAMES = 13
MOST_LINES = 700


def importers(paths: Iterable[Path], barred: set[str]) -> list[str]:
    return [place(path) for path in paths if barred & {n.split(".")[0] for n in imported(path)}]


@pytest.mark.slow
def test_only_some_rooms_import_ray_torch_and_the_orchestrator() -> None:
    """A workload can be used without jobs, results or Ray; planning and scheduling are functions on
    values."""
    assert importers(modules("workloads"), {"orchestrator", "ray"}) == []
    others = [path for path in modules("orchestrator") if path.parent.name != "on_ray"]
    assert importers(others, {"ray"}) == []
    pure = modules(*(f"orchestrator/{room}" for room in PURE))
    assert len(pure) > 30 and importers(pure, {"torch", "transformers", "ray"}) == []


def module_name(path: Path) -> str:
    """``orchestrator/grid/__init__.py`` -> ``orchestrator.grid``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


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


@pytest.mark.slow
def test_imports_go_down_the_layers() -> None:
    """Those inside functions too; names of a package's ``__init__`` count as the package."""
    files = {module_name(path) for path in modules(*PRODUCT)}
    upward = []
    for path in modules(*PRODUCT):
        here = layer_of(module_name(path))
        for name in sorted(imported(path) & files) if here is not None else ():
            there = layer_of(name)
            if there is not None and there[0] == here[0] and there[1] > here[1]:
                upward.append(f"{module_name(path)} -> {name}")
    assert len(upward) <= MOST_UPWARD, "\n".join(upward)


@pytest.mark.slow
def test_no_module_imports_in_a_circle() -> None:
    """Every module can be read, and imported, before those that use it; imports inside functions
    count, those for type checkers do not."""
    files = {module_name(path): path for path in modules(*PRODUCT)}
    arrows = {}
    for name, path in files.items():
        names = imported(path) & files.keys()
        # `from package import module` is of the module; the package's own file says nothing here.
        packages = {one for one in names if any(o.startswith(f"{one}.") for o in names)}
        arrows[name] = names - packages - {name}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


def lazy_imports(path: Path) -> set[str]:
    names = set()
    for function in syntax(path):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.add(node.module)
    return names


@pytest.mark.slow
def test_only_large_libraries_are_imported_inside_functions() -> None:
    lazy = [
        f"{place(path)}: {name}"
        for path in modules(*PRODUCT)
        for name in sorted(lazy_imports(path))
        if name.split(".")[0] not in LAZY.split()
    ]
    assert len(lazy) <= MOST_LAZY, "\n".join(lazy)


def test_no_file_is_too_long() -> None:
    lengths = {place(path): len(path.read_text().splitlines()) for path in modules(*PRODUCT)}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


@pytest.mark.slow
def test_names_of_files_and_classes_are_the_fields_own_words() -> None:
    names = []
    for path in modules(*PRODUCT):
        names += [(place(path), word) for word in path.stem.split("_")]
        for node in syntax(path):
            if isinstance(node, ast.ClassDef):
                words = re.findall(r"HeldOut|[A-Z][a-z]+|[a-z]+", node.name)
                names += [(f"{place(path)}: {node.name}", word.casefold()) for word in words]
    private = sorted({where for where, word in names if word in PRIVATE_WORDS.split()})
    assert len(private) <= MOST_PRIVATE_NAMES, "\n".join(private)


def test_device_branches_live_in_the_device_classes() -> None:
    words = ("torch.cuda.", "torch.hpu.", "habana_frameworks")
    others = [path for path in modules("workloads") if path.parent.name != "devices"]
    assert [p for p in others if any(word in p.read_text(encoding="utf-8") for word in words)] == []


def test_the_stand_in_for_the_habana_bridge_is_a_thing_of_tests() -> None:
    for path in modules(*PRODUCT, "tools"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bstand-?in\b|tests/gaudi", text, re.IGNORECASE), path
    assert (
        'include = ["nightgrid*", "orchestrator*", "workloads*"]'
        in (ROOT / "pyproject.toml").read_text()
    )
    assert (ROOT / "tests/gaudi/standin/habana_frameworks/__init__.py").is_file()
    assert importlib.util.find_spec("habana_frameworks") is None


WORDS_OF_TORCH = {"cpu", "graph"}  # ``tensor.cpu()``, ``torch.cuda.graph()``
#: Methods that look a text up, or compare with it.
LOOKING = {"get", "pop", "setdefault", "startswith", "endswith", "index", "count"}


def names_that_decide(nodes: list[ast.AST]) -> set[str]:
    """The texts that are compared with something, looked up, or keys, and names of attributes.
    Where a tensor lies is torch's to say: ``tensor.device.type == "cpu"``."""
    names: set[str] = set()

    def look(*nodes: ast.AST | None) -> None:
        for node in nodes:
            for inner in ast.walk(node) if node is not None else ():
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    names.add(inner.value)

    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if not any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides):
                look(*(side for side in sides if not isinstance(side, ast.Call)))
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
        elif isinstance(node, ast.Attribute) and node.attr not in WORDS_OF_TORCH:
            names.add(node.attr)
    return names


@cache
def decisions() -> dict[Path, set[str]]:
    return {path: names_that_decide(syntax(path)) for path in modules(*PRODUCT)}


def deciding(names: set[str], own_folder: str) -> dict[str, set[str]]:
    """The names that decide in each file of the product, that of their own declaration aside."""
    found = {}
    for path, decided in decisions().items():
        own = path.stem.replace("_", "-") if path.parent == ROOT / own_folder else ""
        if others := decided & (names - {own, own.upper()}):
            found[place(path)] = others
    return found


@pytest.mark.slow
def test_no_devices_name_decides_anything() -> None:
    """Rules ask what a device can, clusters what it declares: a new one is a new file. Its own
    file names it, and what engines say of it: the fields of a spec, and words of a library."""
    names = {name for spec in own_devices() for name in (spec.name, spec.accelerator)}
    found = deciding(names, "workloads/devices")
    engines = {name for name in found if name.startswith("workloads/engines/")}
    assert found.keys() == engines
    assert not found.keys() & {f"workloads/engines/{name}.py" for name in ("__init__", "base")}


@pytest.mark.slow
def test_no_engines_name_decides_anything() -> None:
    """Workloads ask for abilities, rules for features: a new engine is a new file. The one name
    that is found is that of a package whose version a spec limits. ``endpoint`` is also a word of
    other protocols."""
    names = set(ENGINES.own) - {"endpoint"}
    found = deciding(names, "workloads/engines")
    assert found.pop("workloads/registry.py") == names  # where each is declared
    assert found == {"workloads/engines/optimum_habana/__init__.py": {"transformers"}}


@pytest.mark.parametrize(
    "source",
    [
        'if device == "hpu": pass',
        'if "hpu" != device: pass',
        'if device in ("cuda", "hpu"): pass',
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
    assert "hpu" in names_that_decide(nodes_of(source))
    others = ('tensor.device.type == "cpu" or tensor.cpu()', 'log(f"{device} is no hpu")')
    assert not names_that_decide(nodes_of("\n".join(others))) & {"hpu", "cpu"}


HEAVY = ("torch", "transformers", "ray", "pyarrow")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "printed", "idle"),
    [
        (["--help"], "nightgrid run", HEAVY),
        # Of what a plan of text generation has no use for.
        (
            ["plan", "grids/smoke.yaml", "--results", "none-here"],
            "job_id",
            (*HEAVY, "asyncio", "orchestrator.on_ray"),
        ),
    ],
)
def test_a_command_loads_only_what_it_needs(
    command: list[str], printed: str, idle: tuple[str, ...]
) -> None:
    code = (
        "import contextlib, sys\nfrom orchestrator.cli.main import main\n"
        f"with contextlib.suppress(SystemExit):\n    main({command!r})\n"
        f"sys.exit(', '.join(name for name in {idle!r} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


#: Every file that may read the time of day, and what for. A duration, a timeout or a backoff is no
#: reason: the time of day is set now and then (``orchestrator/util/host.py``).
TIME_OF_DAY = """\
util/host.py: where an interval of a row begins, whose length is of the steady clock; a deadline
util/output.py: since when output is lost, for people
cli/options.py: 08:00 is the next one; the deadline of a budget that begins now
cli/run.py: a deadline is a time of day
cli/plan.py: how far a deadline is away, for people
cli/runs.py: how old a driver's last word is, which may be on another host
driver/loop.py: for notes, the status and the deadline
driver/options.py: how long ago the command was typed
driver/plan.py: how far a deadline is away
driver/rows.py: when a row was recorded
driver/run.py: when a card was checked; the order of a cluster's queue
driver/supervisor.py: when the first driver began, for its notice; how far a deadline is away
watch/live.py: the time of day before each line of a log
watch/state.py: how old the driver's last word was when the page was opened
on_ray/gcs.py: since when the control store is silent, for people
on_ray/jobs.py: a name that people can place
on_ray/run_status.py: how old a driver's last word is, on another host; when a cluster was seen
on_ray/examination.py: times of day of hosts are compared
on_ray/outcomes.py: how old a file is, by its own time
report/run_report.py: how old a driver's last word is, which may be on another host
store/lock.py: since when a run is held, for people; a sign of life of a driver on another host
workloads/engines/graph/server.py: `created` of OpenAI's answers
"""
_READS = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}


def reads_the_time_of_day(nodes: list[ast.AST]) -> bool:
    """Tell if the time of day is named: called, handed over as a clock, or imported."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if node.attr in _READS.get(owner, ()):
                return True
        names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
        if names & _READS["time"] and node.module == "time":
            return True
    return False


@pytest.mark.slow
def test_the_time_of_day_is_read_only_where_somebody_wants_to_know_it() -> None:
    """Durations are of a clock that never jumps. A new reader of the time of day says here why it
    is one, and one that is gone is struck off."""
    readers = {
        place(path).removeprefix("orchestrator/")
        for path in modules(*PRODUCT)
        if reads_the_time_of_day(syntax(path))
    }
    assert readers == {line.partition(": ")[0] for line in TIME_OF_DAY.splitlines()}


SECTION = re.compile(r"^## (\w+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CASE = re.compile(r"^\| (.+?) \| .+? \| (?:(test_\w+) )?\|$", re.MULTILINE)


def documented_cases() -> list[tuple[str, str, str]]:
    """Section, case and test of every row of the page."""
    page = (ROOT / "docs/inspection.md").read_text()
    return [
        (section, case, test or "test_is_refused")
        for section, body in SECTION.findall(page)
        for case, test in CASE.findall(body)
        if case != "case"
    ]


def test_every_case_names_a_test_that_exists() -> None:
    cases = documented_cases()
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert [case for case in cases if case[2] not in there] == []
    kinds = Counter(kind for kind, *_ in cases)
    assert len(kinds) == 4 and min(kinds.values()) >= 10 and kinds.total() >= 95


def test_every_tested_checkpoint_stands_in_the_table() -> None:
    """By the keys of the tables of cases."""
    cases = {case for _, case, _ in documented_cases()}
    text = (ROOT / "tests/workloads/inspection/test_look.py").read_text()
    assert set(re.findall(r'^    "([a-z0-9-]+)": [(\[]', text, re.MULTILINE)) <= cases
