"""An engine: it multiplies, and trains by Nightgrid's own loop."""

from workloads.engines.base import Ability, EngineSpec

SPEC = EngineSpec(
    name="outside-engine",
    summary="Products by einsum.",
    needs="native_eager",
    abilities={
        "multiply": Ability(function=f"{__name__}:multiply"),
        "train": Ability(function="workloads.training.loop:run"),
    },
    install="pip install outside",
    own_process=False,
)


def multiply(matrix):
    """The matrix times itself."""
    import torch

    return torch.einsum("ij,jk->ik", matrix, matrix)
