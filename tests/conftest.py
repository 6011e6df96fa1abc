"""What every test gets: laws are checked without a time limit per example, since CI is shared, and
there on the same examples each time; at a desk each run tries others, and finds new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "nightgrid",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("nightgrid")
