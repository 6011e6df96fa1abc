"""Several cards on one model: who shares what with whom, and the libraries that do it.

*Data-parallel*: every card has the model and a part of the batch, and gradients are averaged (DDP);
ZeRO then also splits optimizer state (1), gradients (2) and weights (3) over the cards (DeepSpeed).
*Tensor-parallel*: each matrix is split over the cards, which work on the same batch. Both together:
groups of tensor-parallel cards, each with a part of the batch.
"""
