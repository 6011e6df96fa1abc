"""The bridge's counters: graphs compiled, operations left to the host, recipes found or made.

Here a graph is compiled when a process meets shapes of inputs that it has not met: the first call
of a wrapped module, or of what torch.compile hands over, with them. Times are microseconds, as the
bridge has them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAMES = ("graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache")


class Metric:
    def __init__(self, name: str) -> None:
        self._name = name
        self.numbers: Counter[str] = Counter()
        self.microseconds = 0

    def name(self) -> str:
        return self._name

    def stats(self) -> list[tuple[str, Any]]:
        """Names and counts, as the bridge gives them."""
        number = self.numbers["TotalNumber"]
        if self._name == "graph_compilation":
            average = self.microseconds / number if number else 0
            return [("TotalNumber", number), ("TotalTime", self.microseconds), ("AvgTime", average)]
        if self._name == "cpu_fallback":
            return [("TotalNumber", number), ("FallbackOps", {})]
        if self._name == "recipe_cache":
            hits, misses = self.numbers["TotalHit"], self.numbers["TotalMiss"]
            return [
                ("TotalHit", hits),
                ("TotalMiss", misses),
                ("RecipeHit", {}),
                ("RecipeMiss", {}),
            ]
        return [("TotalNumber", number), ("TotalSuccessful", 0), ("AvgTime", 0), ("MaxTime", 0)]

    def reset(self) -> None:
        self.numbers.clear()
        self.microseconds = 0


_metrics = {name: Metric(name) for name in _NAMES}


def metric_global(name: str) -> Metric | None:
    return _metrics.get(name)


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    """Counts of a scope alone."""
    before = Counter(_metrics[name].numbers)
    local = Metric(name)
    try:
        yield local
    finally:
        local.numbers = _metrics[name].numbers - before


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
