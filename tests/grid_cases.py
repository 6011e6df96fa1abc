"""Grids for tests: a vocabulary that looks at no disk, and a short way to write a grid."""

from __future__ import annotations

from functools import lru_cache

from orchestrator.grid.parser import Grid, parse_grid
from orchestrator.grid.vocabulary import Vocabulary

HEAD = "name: g\ndefaults: {workload: text-generation, model: tiny-chatglm3}\nexperiments:\n"


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """The real workloads and precisions; models and datasets go unchecked."""
    return Vocabulary.installed(check_data=False)


def grid(text: str) -> Grid:
    return parse_grid(text.encode(), "g.yaml", vocabulary=vocabulary())


def experiments(body: str) -> Grid:
    """The grid whose list of experiments is ``body``, in YAML's flow or block style."""
    return grid(HEAD + body)


def one(body: str) -> Grid:
    """The grid of one experiment: the lines of ``body`` are its keys."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return grid(f"{HEAD}  - name: e\n{lines}")
