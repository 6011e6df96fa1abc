"""Random state of the card: the CPU's."""

from typing import Any

import torch

manual_seed = manual_seed_all = torch.default_generator.manual_seed


def get_rng_state(*_: Any) -> Any:
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[Any]:
    return [get_rng_state()]


def set_rng_state(state: Any, *_: Any) -> None:
    torch.default_generator.set_state(state)


def set_rng_state_all(states: list[Any]) -> None:
    set_rng_state(states[0])
