"""Decide before anything starts which jobs run, wait for others, or cannot run. Pure."""
