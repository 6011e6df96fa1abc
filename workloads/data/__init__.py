"""Datasets and their token lengths."""
