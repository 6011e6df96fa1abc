"""The walls of the house: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Modules whose decisions are plain functions on values: they may not reach any edge.
PURE = [
    "attempt",
    "calibrations",
    "cluster",
    "deadline",
    "energy",
    "doctor/checks",
    "doctor/cluster_checks",
    "doctor/node_checks",
    "doctor/facts",
    "doctor/text",
    "errors",
    "events",
    "failure",
    "forecast",
    "history",
    "job",
    "measurement",
    "needs",
    "notice",
    "plan",
    "verifying",
    *(f"scheduling/{path.stem}" for path in (ROOT / "orchestrator" / "scheduling").glob("*.py")),
]
EDGES = {
    "card_sampler",
    "cli",
    "commands",
    "driver",
    "environment",
    "in_process_executor",
    "live",
    "live_display",
    "notify",
    "on_ray",
    "output",
    "results",
    "running",
    "watching",
    "worker",
}
HEAVY = ("torch", "transformers", "ray", "pyarrow", "pydantic")


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names of all modules that a file imports, type-checking blocks left out."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return names


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", modules("workloads"), ids=lambda p: str(p.relative_to(ROOT)))
def test_workloads_know_nothing_of_orchestrator_or_ray(path: Path) -> None:
    """A workload can be used without jobs, grids, files of results or Ray."""
    tops = {name.split(".")[0] for name in imported(path)}
    assert not tops & {"orchestrator", "ray"}


@pytest.mark.parametrize("path", modules("orchestrator"), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_ray_modules_import_ray(path: Path) -> None:
    """Ray stays behind its own modules, so that everything else can be tested without it."""
    if path.parent.name == "on_ray":
        return
    assert "ray" not in {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_reach_no_edge(name: str) -> None:
    """Planning, scheduling, retrying and summarizing are functions on values."""
    found = imported(ROOT / "orchestrator" / f"{name}.py")
    reached = {n.split(".")[1] for n in found if n.startswith("orchestrator.")}
    assert not reached & EDGES
    assert not {n.split(".")[0] for n in found} & {"torch", "transformers", "ray"}


@pytest.mark.parametrize("path", modules("workloads"), ids=lambda p: str(p.relative_to(ROOT)))
def test_device_branches_live_in_the_device_classes(path: Path) -> None:
    """No code but ``devices/`` asks torch for an accelerator: an unknown device must raise."""
    if path.parent.name == "devices":
        return
    text = path.read_text()
    assert "torch.cuda." not in text and "torch.hpu." not in text
    assert "habana_frameworks" not in text


def test_help_loads_nothing_heavy() -> None:
    """``nightgrid --help`` is instant: none of the large packages is imported."""
    code = (
        "import sys\nfrom orchestrator.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "sys.exit(','.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "nightgrid run" in done.stdout


#: What a plan of text generation has no use for, beside the large packages; each costs its start.
UNPLANNED = (
    *("numpy", "rich", "asyncio", "html"),
    *("workloads.techniques", "workloads.api", "orchestrator.worker", "orchestrator.on_ray"),
)


def test_a_plan_loads_only_what_it_needs() -> None:
    """``nightgrid plan`` starts quickly: pydantic is the one large package that it imports."""
    code = (
        "import sys\nfrom orchestrator.cli import main\n"
        "main(['plan', 'grids/smoke.yaml', '--results', 'none-here'])\n"
        f"loaded = [m for m in {(*HEAVY, *UNPLANNED)!r} if m in sys.modules]\n"
        "sys.exit(0 if loaded == ['pydantic'] else ', '.join(loaded))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "job_id" in done.stdout
