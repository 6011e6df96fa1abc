"""Helpers of all workloads: files from elsewhere, and statistics."""
