"""Going on from the checkpoint that an earlier attempt at the same job has left on this node.

All ranks go on from the same step or none does. The steps of the attempt before are not this one's:
none of them is timed or counted here, and only their losses are told in the row.
"""

from __future__ import annotations

from typing import Any

from workloads.techniques.base import Training
from workloads.training.checkpoints import Checkpoints, read_state
from workloads.training.saver import read_newest, weights_of


def resume(training: Training, checkpoints: Checkpoints) -> None:
    """Go on from the newest step that all ranks have, if it can be read; say so in the row."""
    writer = checkpoints.of_rank(training.layout.tensor_rank)
    steps = {*checkpoints.steps()} & {*writer.steps()}
    common = set.intersection(*training.gather(steps))
    step = max(common, default=None)
    state: dict[str, Any] = {}
    if training.begins_anew:
        problem = training.begins_anew
    elif checkpoints.held:
        problem = f"another attempt still writes to {checkpoints.held}"
    elif step is None:
        problem = f"no checkpoint in {checkpoints.directory}"
    elif training.steps - (step + 1) < training.least_steps:
        problem = (
            f"the checkpoint is of step {step + 1} of {training.steps}, and a row needs "
            f"{training.least_steps} more, warm-up included"
        )
    else:
        state, problem = _read(training, checkpoints, writer, step)
    problem = next(filter(None, training.gather(problem)), "")
    if step is None or problem:
        if step is not None or checkpoints.held or training.attempt > 1:
            training.details["resumed"] = f"no, began with step 0: {problem}"
        return
    _restore(training, checkpoints, state, step)
    training.details["resumed"] = f"from step {training.first_step} of {training.steps}"
    training.details["losses_before"] = " ".join(f"{sum(each):.6g}" for each in training.losses)


def _read(
    training: Training, checkpoints: Checkpoints, writer: Checkpoints, step: int
) -> tuple[dict[str, Any], str]:
    """The state that this rank goes on from, and a reason where it cannot."""
    try:
        state = read_newest(writer, step) | {"own": read_state(checkpoints.path(step))}
    except Exception as error:  # torch raises many kinds for a file that is damaged
        return {}, f"the checkpoint of step {step + 1} cannot be read: {error}"
    trained, frozen = weights_of(training.model)
    shapes = {name: tensor.shape for name, tensor in {**trained, **frozen}.items()}
    read = {name: tensor.shape for name, tensor in state["weights"].items()}
    if training.divided is None and read != shapes:
        return {}, f"the checkpoint of step {step + 1} is of another model"
    return state, ""


def _restore(
    training: Training, checkpoints: Checkpoints, state: dict[str, Any], step: int
) -> None:
    own = state["own"]
    if training.divided is not None:
        training.divided.load(checkpoints.divided(step))
        state = {}
    restore(training, state, own["stateful"])
    training.first_step = step + 1
    training.losses = [(loss,) for loss in own["losses"]]
    training.random_state = own["random"]


def restore(training: Training, state: dict[str, Any], stateful: dict[str, Any]) -> None:
    """Put weights and optimizer back to a state, where there is one, and what else remembers."""
    import torch

    if state:
        with torch.no_grad():
            for name, tensor in training.model.state_dict().items():
                # Others (quantised and frozen) were loaded from the model as they were.
                if name in state["weights"] and type(tensor) is torch.Tensor:
                    tensor.copy_(state["weights"][name])
        training.optimizer.load_state_dict(state["optimizer"])
    for name, each in training.stateful.items():
        each.load_state_dict(stateful[name])
