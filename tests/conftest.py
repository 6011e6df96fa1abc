"""What every test gets: laws are checked without a time limit per example, since CI is shared."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "nightgrid", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("nightgrid")
