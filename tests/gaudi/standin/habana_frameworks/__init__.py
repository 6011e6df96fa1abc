"""Stand-in for tests: the Habana bridge on a CPU. See the README beside this package."""


def __autoload() -> None:
    """What ``import torch`` calls by the entry point ``torch.backends``."""
    import habana_frameworks.torch  # noqa: F401
