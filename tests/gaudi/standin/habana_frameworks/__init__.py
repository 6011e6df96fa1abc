"""Stand-in for tests: the Habana bridge on a CPU. See the README beside this package."""

import os


def __autoload() -> None:
    """Load the bridge with torch, by the entry point ``torch.backends``; not in lazy mode."""
    if os.environ.get("PT_HPU_LAZY_MODE", "0") != "1":
        import habana_frameworks.torch  # noqa: F401
