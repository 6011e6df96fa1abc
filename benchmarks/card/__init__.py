"""Scripts for a machine with one real card: each prints rows as JSON, one a line."""
