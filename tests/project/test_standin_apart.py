"""The stand-in for the Habana bridge is a thing of tests: the product never meets it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from workloads import devices
from workloads.base import CardNotAcquired

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "gaudi" / "standin"


@pytest.mark.parametrize("package", ["orchestrator", "workloads", "tools"])
def test_no_product_code_names_it(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\bstand-?in\b", text, re.IGNORECASE), path
        assert "tests/gaudi" not in text, path


def test_it_is_not_installed_with_nightgrid() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'include = ["orchestrator*", "workloads*"]' in text
    assert (STANDIN / "habana_frameworks" / "__init__.py").is_file()
    assert importlib.util.find_spec("habana_frameworks") is None


def test_without_a_bridge_a_gaudi_card_is_refused() -> None:
    device = devices.device_for("hpu")
    for use in (device.synchronize, device.device_name, device.peak_memory_bytes):
        with pytest.raises(CardNotAcquired, match="no Habana bridge here"):
            use()
