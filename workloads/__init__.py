"""The code that runs on a card: models, data, precisions, devices and the timed loops.

Nothing here knows about grids, scheduling, Ray or result files.
"""
