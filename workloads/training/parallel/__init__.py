"""Training on several cards: layouts, exchanges, split matrices, stages, sharded weights."""
