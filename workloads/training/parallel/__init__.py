"""Training on several cards.

*Data-parallel*: cards have the model and a part of the batch (DDP); ZeRO also splits optimizer
state (1), gradients (2) and weights (3). *Tensor-parallel*: cards split each matrix.
"""
