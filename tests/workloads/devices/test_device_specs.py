"""Declarations of devices, ours and those of other packages."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outside_device import install, offer
from source_tree import ROOT

from workloads import devices
from workloads.devices import own_devices


def test_a_capability_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no capability 'pined_memory'"):
        devices.device_spec("cuda").can("pined_memory")
    with pytest.raises(ValueError, match="no capabilities streems"):
        dataclasses.replace(devices.device_spec("cuda"), capabilities=frozenset({"streems"}))


@pytest.mark.parametrize("spec", own_devices(), ids=lambda spec: spec.name)
def test_a_device_has_a_name_in_capitals_and_one_variable_for_its_cards(spec) -> None:
    for name in ("xpu", "1XPU", "X PU", ""):
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
SPEC = DeviceSpec(name="outside", accelerator="GPU", title="t", summary="s", handle="m:C",
    ray_resource="R", precisions={})
"""


def test_a_device_with_a_taken_name_takes_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(SPEC)
    offer(tmp_path, {"outside": "outside:SPEC"})
    accelerators, _, *warnings = known(tmp_path)
    assert accelerators == "HPU GPU CPU"
    assert "device outside is left out: there is an accelerator GPU" in "\n".join(warnings)
