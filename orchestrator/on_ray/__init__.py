"""The only modules that import Ray: nodes, claimed cards, actors, the executor, submission."""
