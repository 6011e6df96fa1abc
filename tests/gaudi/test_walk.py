"""The walk of docs/gaudi.md from bare servers to the first night: commands of the page that need no
card, second server or download of Habana's, as they stand there, with emulated cards."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_whole_path import CARDS, MEASURE, ROOT, details, nightgrid, rows_of

PAGE = ROOT / "docs/gaudi.md"
pytestmark = pytest.mark.timeout(1200)

#: First words of commands that need what is not here.
CANNOT = {
    **dict.fromkeys(("wget", "chmod", "./habanalabs-installer.sh", "hl-smi"), "Habana's driver"),
    **dict.fromkeys(("sudo", "echo", '{"runtimes":', "END"), "a server to change"),
    "cat": "a server's own settings",
    **dict.fromkeys(("docker", "git", "for", "done"), "Habana's images"),
    **dict.fromkeys(("ssh", "rsync", "ray up"), "servers"),
    **dict.fromkeys(("pip", "ray get-auth-token", "export"), "run by tests of tokens on real Ray"),
    "nightgrid logs": "a job server; run by tests of submissions on real Ray",
}


def commands() -> list[str]:
    blocks = re.findall(r"^```bash[^\n]*\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    text = "\n".join(blocks).replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


def reason_against(command: str) -> str | None:
    words = command.split()
    return CANNOT.get(" ".join(words[:2])) or CANNOT.get(words[0])


def here(command: str) -> list[str]:
    words = shlex.split(command)[1:]
    words = [re.sub(r"^/opt/nightgrid/", "", word) for word in words]
    if "--address" in words:
        at = words.index("--address")
        words[at : at + 2] = [] if words[0] == "status" else CARDS
    if words[0] == "submit":
        words[0] = "run"
    if words[0] == "doctor":
        words[words.index("--nodes") + 1] = "1"
        words[words.index("--shared") + 1] = "."
        words += ["--import", "habana_frameworks.torch"]  # all of them take a minute on two cores
    return words


def small(name: str) -> dict[str, Any]:
    """A shipped grid's first experiment with one size and the precision of the card."""
    import yaml

    grid: dict[str, Any] = yaml.safe_load((ROOT / f"grids/{name}.yaml").read_text())
    first = grid["experiments"][0]
    # Two jobs of one shape, so that the second finds the graphs of the first.
    first["axes"] = {"precision": ["bf16"], "batch_size": [2], "ignore_eos": [True, False]}
    first.pop("exclude", None)
    first |= {"prompts": 2, "output_tokens": 4}
    grid["defaults"] |= {"accelerator": "HPU", "engine": "optimum-habana"}
    return grid | {"experiments": [first], "measure": MEASURE}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the grids that the page names, made small."""
    directory = tmp_path_factory.mktemp("walk")
    (directory / "grids").mkdir()
    for name in ("smoke", "chatglm3-precision"):
        (directory / f"grids/{name}.yaml").write_text(json.dumps(small(name)))
    shutil.copy(ROOT / "grids/gaudi-atlas.yaml", directory / "grids")
    return directory


def test_every_command_of_the_page_is_run_or_named_with_a_reason() -> None:
    page = commands()
    ran = [command for command in page if reason_against(command) is None]
    assert all(command.startswith("nightgrid ") for command in ran), ran
    assert len(ran) >= 8
    begin = {" ".join(each.split()[:count]) for each in page for count in (1, 2)}
    assert CANNOT.keys() <= begin


def test_the_walk_to_the_first_night(workplace: Path, capsys: Any) -> None:
    """In the page's order: the doctor, the first minutes, whether the numbers are right, the night
    (its jobs are those of the first minutes, and compile nothing any more), its report, the atlas.
    """
    done = set()
    for command in commands():
        if reason_against(command) is not None:
            continue
        words = here(command)
        if words == ["status"] and "status" in done:
            continue
        if "theirs.json" in words:
            shutil.copy(workplace / "mine.json", workplace / "theirs.json")
        said = nightgrid(*words, directory=workplace)
        done.add(words[0])
        if words[0] == "doctor":
            assert "2 HPU" in said
    assert {"doctor", "run", "status", "verify", "report", "export"} <= done
    assert (workplace / "all.json").read_text() == (workplace / "mine.json").read_text()
    results = workplace / "results"
    first, night = rows_of(results, "smoke"), rows_of(results, "chatglm3-precision")
    assert len(first) == len(night) == 2 and all(row.emulated for row in first)
    verified = rows_of(results, "verify-chatglm3-precision")
    assert verified and all(details(row)["agrees"].startswith("yes") for row in verified)

    # Cards that begin one shape together both compile it; else one finds what the other made.
    cold, cached = ([details(row)["compile_cache"] for row in rows] for rows in (first, night))
    assert sum(int(text.split()[1]) for text in cold if text.startswith("cold: ")) >= 1
    assert all(text.startswith("cached") for text in cached)
