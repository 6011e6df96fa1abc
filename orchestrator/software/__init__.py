"""A row's software: one job again without a cluster."""
