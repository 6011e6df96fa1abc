"""The bridge's counters: graphs compiled, operations left to the host, recipes found or made.

Here a graph is compiled when a process meets shapes of inputs that it has not met: the first call
of a wrapped module, or of what torch.compile hands over, with them. It takes no time.
"""

from typing import Any


class Metric:
    def __init__(self, *names: str) -> None:
        self.numbers = dict.fromkeys(names, 0)

    def stats(self) -> list[tuple[str, Any]]:
        """Names and counts, as the bridge gives them."""
        return list(self.numbers.items())


_metrics = {
    "graph_compilation": Metric("TotalNumber", "TotalTime"),
    "cpu_fallback": Metric("TotalNumber"),
    "recipe_cache": Metric("TotalHit", "TotalMiss"),
}


def metric_global(name: str) -> Metric | None:
    return _metrics.get(name)


#: Of each graph that was compiled: whether it carries the attribute of inference mode. For tests.
inference_graphs: list[bool] = []


def met_graph(known: bool, inference: bool = False) -> None:
    """Count a graph that was asked for: compiled, unless it was known."""
    _metrics["recipe_cache"].numbers["TotalHit" if known else "TotalMiss"] += 1
    if not known:
        inference_graphs.append(inference)
        _metrics["graph_compilation"].numbers["TotalNumber"] += 1
