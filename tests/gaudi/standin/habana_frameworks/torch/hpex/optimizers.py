"""Fused optimizers."""

from typing import Any

import torch


class FusedAdamW(torch.optim.AdamW):
    """AdamW with the arguments of the bridge's."""

    def __init__(self, params: Any, lr: float = 1e-3, **kwargs: Any) -> None:
        kwargs.pop("bias_correction", None)
        super().__init__(params, lr=lr, **kwargs)
