"""The optimizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from workloads.base import Unsupported
from workloads.settings import setting
from workloads.techniques.base import Technique, Training

if TYPE_CHECKING:
    import torch

#: The package that makes each kind of optimizer, where torch does not.
_PACKAGES = {
    "adamw-8bit": "bitsandbytes",
    "adamw-8bit-paged": "bitsandbytes",
    "adamw-8bit-torchao": "torchao",
}


class OptimizerChoice(Technique):
    """The optimizer: the rule that turns gradients into changes, and its memory of each weight.

    AdamW keeps two averages per trained weight, in 32 bits twice the bytes of the weights
    themselves. Fused, it makes one pass over memory where the plain one makes several. The 8-bit
    kinds keep the averages in blocks of 8-bit numbers; small tensors stay in 32 bits, and so do
    embeddings, whose rows learn rarely and by unlike amounts. The paged one moves averages to the
    host when a card runs full. Adafactor keeps a row and a column of averages for each matrix.
    """

    name: ClassVar[str] = "optimizers"
    title: ClassVar[str] = "optimizer"
    order: ClassVar[int] = 110
    capabilities: ClassVar[Any] = {
        ("optimizer", "adamw-8bit"): "optimizers_8bit",
        ("optimizer", "adamw-8bit-torchao"): "optimizers_8bit",
        ("optimizer", "adamw-8bit-paged"): "paged_memory",
        ("optimizer", "adamw-fused"): "fused_optimizer",
    }

    optimizer: Literal[
        "adamw", "adamw-fused", "adamw-8bit", "adamw-8bit-paged", "adamw-8bit-torchao", "adafactor"
    ] = setting(
        "adamw",
        role="choice",
        always_in_id=True,
        description="adamw is PyTorch's, adamw-fused its one-pass kernel (on Gaudi: Habana's), "
        "adamw-8bit and adamw-8bit-paged are bitsandbytes', adamw-8bit-torchao torchao's. No "
        "weight decay, constant learning rate.",
    )

    def on_model(self, training: Training) -> None:
        package = _PACKAGES.get(self.optimizer)
        if package is not None and importlib.util.find_spec(package) is None:
            raise Unsupported(
                f"optimizer {self.optimizer} needs the package '{package}', which is not installed "
                "here; install it with: pip install 'nightgrid[quant]'"
            )

        def make(parameters: Sequence[torch.nn.Parameter]) -> Any:
            return _make(self.optimizer, parameters, training)

        training.make_optimizer = make


def _make(name: str, parameters: Sequence[torch.nn.Parameter], training: Training) -> Any:
    import torch

    settings: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": 0.0}
    if name == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    if name == "adamw-fused":
        return training.device.fused_adamw(parameters, **settings)
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, **settings)
    tables = [m for m in training.model.modules() if isinstance(m, torch.nn.Embedding)]
    embeddings = {id(table.weight) for table in tables if table.weight.requires_grad}
    training.details["averages_in_32_bits"] = f"{len(embeddings)} embeddings, small tensors"
    if name == "adamw-8bit-torchao":
        from torchao.optim import AdamW8bit

        return _by_torchao(AdamW8bit, embeddings)(parameters, **settings)
    import bitsandbytes

    paged = bitsandbytes.optim.PagedAdamW8bit if "paged" in name else bitsandbytes.optim.AdamW8bit
    return _by_bitsandbytes(paged, embeddings)(parameters, **settings)


def _by_bitsandbytes(kind: Any, embeddings: set[int]) -> Any:
    """The optimizer with 32-bit averages of these; its own register of exceptions is the process's,
    and would outlive the job."""

    class Optimizer(kind):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: Any) -> Any:
            found = super().get_config(gindex, pindex, group)
            whole = id(group["params"][pindex]) in embeddings
            return found | {"optim_bits": 32} if whole else found

    return Optimizer


def _by_torchao(kind: Any, embeddings: set[int]) -> Any:
    """The optimizer with 32-bit averages of these, and of what it leaves in the weights' format."""
    import torch

    class Optimizer(kind):  # type: ignore[misc]
        def _new_buffer(self, p: Any, signed: bool) -> Any:
            if id(p) in embeddings:
                return torch.zeros_like(p, dtype=torch.float32)
            made = super()._new_buffer(p, signed)
            part = made.to_local() if hasattr(made, "to_local") else made
            return made.float() if type(part) is torch.Tensor else made

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)  # torch casts averages to their weights' format
            groups = zip(state_dict["param_groups"], self.param_groups, strict=True)
            for saved, own in groups:
                for number, p in zip(saved["params"], own["params"], strict=True):
                    for name, value in state_dict["state"].get(number, {}).items():
                        if getattr(value, "dtype", None) == torch.float32 and name != "step":
                            self.state[p][name] = value.to(p.device)

    return Optimizer


def state_bytes(optimizer: Any) -> int:
    """Bytes of the optimizer's state, all tensors of it, on whatever device."""
    import torch

    from workloads.weights import stored_bytes

    return sum(
        stored_bytes(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


SPECS = (OptimizerChoice,)
