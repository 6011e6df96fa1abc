"""Stand-in for tests: optimum-habana imports this package for a tokenizer that we do not use, and
a build of it for a CPU is not to be had everywhere."""

from . import transforms

__all__ = ["transforms"]
