"""Datasets: what models are given to read, and what their lengths are."""
