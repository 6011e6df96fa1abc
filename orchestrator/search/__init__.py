"""Searches of a grid: the order in which its cells are measured, and predictions of the others."""
