"""Fitness of a cluster for a night: facts of each node (``probe``), checks, and their text.

``orchestrator.on_ray.examination`` collects the facts of all nodes; it alone knows of Ray.
"""
