"""Nightgrid: turn a grid file into measurements on every card of a Ray cluster.

``orchestrator`` knows everything about jobs and nothing about models; ``workloads`` the
other way round. The arrows between the rooms are listed in ``docs/decisions.md``.
"""

__version__ = "0.1.0"
