"""A task: checkpoints that hold a matrix."""

from workloads.tasks.base import TaskSpec

SPEC = TaskSpec(name="matrix", title="a matrix", architectures=("OutsideMatrix",))
