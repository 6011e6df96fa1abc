"""The bridge's counters: graphs compiled, operations left to the host, recipes found or made.

Here a graph is compiled when a process meets shapes of inputs that it has not met: the first call
of a wrapped module, or of what torch.compile hands over, with them. Times are microseconds, as the
bridge has them.
"""

from collections import Counter
from typing import Any

_NAMES = ("graph_compilation", "cpu_fallback", "recipe_cache")


class Metric:
    def __init__(self, name: str) -> None:
        self._name = name
        self.numbers: Counter[str] = Counter()
        self.microseconds = 0

    def name(self) -> str:
        return self._name

    def stats(self) -> list[tuple[str, Any]]:
        """Names and counts, as the bridge gives them."""
        if self._name == "recipe_cache":
            return [(name, self.numbers[name]) for name in ("TotalHit", "TotalMiss")]
        number = self.numbers["TotalNumber"]
        timed = [("TotalTime", self.microseconds)] if self._name == "graph_compilation" else []
        return [("TotalNumber", number), *timed]

    def reset(self) -> None:
        self.numbers.clear()
        self.microseconds = 0


_metrics = {name: Metric(name) for name in _NAMES}


def metric_global(name: str) -> Metric | None:
    return _metrics.get(name)


#: Of each graph that was compiled: whether it carries the attribute of inference mode. For tests.
inference_graphs: list[bool] = []


def met_graph(known: bool, seconds: float = 0.0, inference: bool = False) -> None:
    """Count a graph that was asked for: compiled, unless it was known."""
    _metrics["recipe_cache"].numbers["TotalHit" if known else "TotalMiss"] += 1
    if not known:
        inference_graphs.append(inference)
        _metrics["graph_compilation"].numbers["TotalNumber"] += 1
        _metrics["graph_compilation"].microseconds += round(seconds * 1e6)


def met_fallback() -> None:
    """Count an operation that was left to the host."""
    _metrics["cpu_fallback"].numbers["TotalNumber"] += 1
