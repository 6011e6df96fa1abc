"""optimum-benchmark's cells in one process: optimum_inline.py CELLS.json OUT.json.

By its Python interface, as its documentation shows it, with ``InlineConfig``: its command ends with
an error in that mode (0.6.0), since it writes down a configuration that then holds an object of its
own. CELLS.json has arguments of the backend and of the scenario for each cell; OUT.json gets
the seconds of the passes of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from optimum_benchmark import (
    Benchmark,
    BenchmarkConfig,
    InferenceConfig,
    InlineConfig,
    PyTorchConfig,
)


def main() -> None:
    cells, out = map(Path, sys.argv[1:3])
    found: dict[str, list[float]] = {}
    for name, (backend, scenario) in json.loads(cells.read_text()).items():
        config = BenchmarkConfig(
            name=name,
            launcher=InlineConfig(device_isolation=False),
            backend=PyTorchConfig(**backend),
            scenario=InferenceConfig(**scenario),
        )
        report = Benchmark.launch(config).to_dict()
        found[name] = report["generate"]["latency"]["values"]
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
