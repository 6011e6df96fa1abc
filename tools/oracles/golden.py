"""Golden files, and how values are compared with them.

Numbers are equal within 1e-9, keys and lists exactly. A string without a blank is compared as it
is; of prose, which may be reworded, the numbers alone are, in any order.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.oracles.product import ROOT

FILES = ROOT / "tests" / "oracles"
_NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:[,.]\d+)*(?:e[+-]?\d+)?")


def load(oracle: str) -> dict[str, Any]:
    """The golden values by case; none where the oracle has no file yet."""
    file = path_of(oracle)
    return dict(json.loads(gzip.decompress(file.read_bytes()))) if file.exists() else {}


def save(oracle: str, values: dict[str, Any]) -> None:
    """Write the golden values; the same values give the same bytes."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    path_of(oracle).write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def path_of(oracle: str) -> Path:
    """The golden file of an oracle."""
    return FILES / f"{oracle}.json.gz"


def differences(golden: Any, now: Any, place: str = "") -> Iterator[str]:
    """A line for each difference, with its place and both values."""
    if isinstance(golden, dict) and isinstance(now, dict):
        for key in sorted({*golden, *now}):
            at = f"{place}.{key}" if place else str(key)
            if key not in now:
                yield f"{at}: gone, was {_short(golden[key])}"
            elif key not in golden:
                yield f"{at}: new, {_short(now[key])}"
            else:
                yield from differences(golden[key], now[key], at)
    elif isinstance(golden, list) and isinstance(now, list):
        if len(golden) != len(now):
            yield f"{place}: {len(golden)} entries are now {len(now)}"
        for number, (was, is_now) in enumerate(zip(golden, now, strict=False)):
            yield from differences(was, is_now, f"{place}[{number}]")
    elif isinstance(golden, str) and isinstance(now, str):
        yield from _different_texts(golden, now, place)
    elif not _equal(golden, now):
        yield f"{place}: {_short(golden)} is now {_short(now)}"


def _equal(golden: Any, now: Any) -> bool:
    plain = (int, float)
    if type(golden) in plain and type(now) in plain:
        return golden == now or math.isclose(golden, now, rel_tol=1e-9, abs_tol=1e-12)
    return type(golden) is type(now) and bool(golden == now)


def _different_texts(golden: str, now: str, place: str) -> Iterator[str]:
    if golden == now:
        return
    if not re.search(r"\s", golden) and not re.search(r"\s", now):
        yield f"{place}: {_short(golden)} is now {_short(now)}"
        return
    before, after = (Counter(_NUMBER.findall(text)) for text in (golden, now))
    for sign, lacking, text in (("-", before - after, golden), ("+", after - before, now)):
        for number, count in lacking.items():
            word = re.compile(rf"(?<![\w.]){re.escape(number)}(?![\d])")
            line = next((line for line in text.splitlines() if word.search(line)), text)
            yield f"{place}: {sign}{number} ({count} times), as in {_short(line.strip())}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
