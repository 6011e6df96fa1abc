"""Declarations of devices, ours and those of other packages."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outside_device import install, offer
from source_tree import PRODUCT, ROOT, modules, syntax

from workloads import devices
from workloads.base import BadConfiguration
from workloads.devices import CAPABILITIES, DEVICES, DeviceSpec, own_devices
from workloads.devices.base import Device
from workloads.models.precision import PRECISIONS

each_device = pytest.mark.parametrize("spec", own_devices(), ids=lambda spec: spec.name)


@each_device
def test_every_device_declares_all_that_is_asked(spec: DeviceSpec) -> None:
    handle = devices.device_class(spec.name)
    assert issubclass(handle, Device) and handle.spec is spec
    assert set(spec.precisions) == set(PRECISIONS)
    assert all(bool(one.means) == one.supported for one in spec.precisions.values())
    others = [one for one in own_devices() if one is not spec]
    assert spec.accelerator not in {one.accelerator for one in others}
    assert spec.order not in {one.order for one in others}
    assert devices.of_accelerator(spec.accelerator) is devices.device_spec(spec.name) is spec
    counts = handle.compilations is not Device.compilations
    assert counts == spec.can("compilation_counters")


def test_the_first_in_the_declared_order_is_the_default_of_a_grid() -> None:
    assert [spec.accelerator for spec in own_devices()] == ["HPU", "GPU", "CPU"]
    assert [spec for spec in own_devices() if spec.host] == [devices.host_device()]


@pytest.mark.slow
def test_rules_ask_for_capabilities_that_there_are() -> None:
    with pytest.raises(ValueError, match="no capability 'pined_memory'"):
        devices.device_spec("cuda").can("pined_memory")
    with pytest.raises(ValueError, match="no capabilities streems"):
        dataclasses.replace(devices.device_spec("cuda"), capabilities=frozenset({"streems"}))
    asked = set()
    for path in modules(*PRODUCT):
        for node in syntax(path):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "can":
                asked |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    had = {each for spec in own_devices() for each in spec.capabilities}
    assert asked <= set(CAPABILITIES) == had


@each_device
def test_a_device_has_a_name_in_capitals_and_one_variable_for_its_cards(spec: DeviceSpec) -> None:
    for name in ("xpu", "Xpu", "1XPU", "X PU", ""):
        with pytest.raises(ValueError, match="is no name in capitals"):
            dataclasses.replace(spec, accelerator=name)
    variable = spec.visible_variable
    assert spec.visible(2, 3) == ({variable: "2,3"} if variable else {})
    assert not variable or devices.environment_for(spec.name, 2)[variable] == "2"


KNOWN = """
import sys
from workloads.devices import all_devices, environment_for
from workloads.models import precision
print(*(spec.accelerator for spec in all_devices()))
[environment_for(name, 0) for name in ("cpu", "cuda", "hpu")], precision.table()
print(*sorted({"torch", "transformers"} & set(sys.modules)))
"""


def known(directory: Path) -> list[str]:
    """The lines of a new process: accelerators, what it imported for them, and warnings."""
    done = subprocess.run(
        [sys.executable, "-c", KNOWN],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines() + done.stderr.splitlines()


def test_a_device_of_another_package_stands_after_ours(tmp_path: Path) -> None:
    install(tmp_path)
    accelerators, imported, *warnings = known(tmp_path)
    assert accelerators == "HPU GPU CPU XPU" and not warnings
    assert imported == ""


SPEC = """
from workloads.devices import DeviceSpec
SPEC = DeviceSpec(name="NAME", accelerator="ACCELERATOR", title="t", summary="s", handle="m:C",
    ray_resource="R", precisions={})
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import nothing_of_that_name", "device outside (outside:SPEC) is left out"),
        ("SPEC = 3", "outside:SPEC is no entry of that name"),
        (SPEC.replace("NAME", "other").replace("ACCELERATOR", "OTHER"), "no entry of that name"),
        (
            SPEC.replace("NAME", "outside").replace("ACCELERATOR", "GPU"),
            "device outside is left out: there is an accelerator GPU",
        ),
    ],
)
def test_a_broken_package_takes_nothing_with_it(tmp_path: Path, source: str, told: str) -> None:
    (tmp_path / "outside.py").write_text(source)
    offer(tmp_path, {"outside": "outside:SPEC"})
    accelerators, _, *warnings = known(tmp_path)
    assert accelerators == "HPU GPU CPU"
    assert told in "\n".join(warnings)


def test_there_is_no_other_device() -> None:
    with pytest.raises(BadConfiguration, match=r"no accelerator 'TPU'; there is: HPU, GPU, CPU"):
        devices.of_accelerator("TPU")
    assert "tpu" not in DEVICES
