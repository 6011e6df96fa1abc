"""Fitness of a cluster for a run: facts of each node (``probe``), checks, and their text.

``orchestrator.on_ray.examination`` collects the facts; only it uses Ray.
"""
