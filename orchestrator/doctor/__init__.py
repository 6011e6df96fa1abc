"""Is this cluster fit for a night? Facts of each node (``probe``), judged (``checks``) and told.

``orchestrator.on_ray.examination`` collects the facts of all nodes; it alone knows of Ray.
"""
