"""Real English prompts of mixed kind and length, written for this project.

Thirty-two requests such as people send to an assistant, one a line of ``english_prompts.txt``, from
a handful of words to about three hundred: throughput on prompts that are all alike says little
about serving. They are in the public domain as far as the authors can make them so.
"""

from __future__ import annotations

from importlib.resources import files

PROMPTS: tuple[str, ...] = tuple(
    files(__package__).joinpath("english_prompts.txt").read_text("utf-8").splitlines()
)
