"""A device of a package that is not Nightgrid's: the one that docs/extending.md writes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from workloads import devices
from workloads.registry import Declared

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extending.md"


def install(directory: Path) -> None:
    """Put the page's package where Python finds it, with the entry point that it declares."""
    files = dict(re.findall(r"```\w+ file=(\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    _, _, declared = files["mine/pyproject.toml"].partition('entry-points."nightgrid.devices"]')
    points = dict(re.findall(r'^(xpu) = "(\w+:\w+)"', declared, re.MULTILINE))
    (directory / "nightgrid_xpu.py").write_text(files["mine/nightgrid_xpu.py"])
    offer(directory, points)


def offer(directory: Path, points: dict[str, str], group: str = "nightgrid.devices") -> None:
    """Have a directory count as an installed package with these entry points."""
    information = directory / "outside-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: outside\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (information / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")


@contextlib.contextmanager
def installed(directory: Path) -> Iterator[None]:
    """The page's package in this process, and in those that it starts."""
    install(directory)
    found_once = (devices.all_devices, devices.of_accelerator)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setenv("PYTHONPATH", str(directory), prepend=":")
        fresh = Declared("workloads.devices", devices.DeviceSpec, "nightgrid.devices")
        patch.setattr(devices, "DEVICES", fresh)
        for function in found_once:
            function.cache_clear()
        yield
    for function in found_once:
        function.cache_clear()
