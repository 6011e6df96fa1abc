"""A task: checkpoints that hold a matrix."""

from workloads.registry import TaskSpec

SPEC = TaskSpec(name="matrix", title="a matrix", architectures=("OutsideMatrix",))
