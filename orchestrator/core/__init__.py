"""The values that every other part speaks of: jobs, attempts, events, cards, rows. Pure."""
