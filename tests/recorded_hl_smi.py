"""Outputs of hl-smi that others recorded on real cards and published; nobody here has a card.

``GAUDI2_TABLE``: hl-smi 1.16.0 on a server of eight Gaudi2, one of them serving a model, from the
README of github.com/rajiv-sudo/gaudi-Llama2-7B-Inference, lines of four cards left out.
``GAUDI3_CSV``: hl-smi 1.24.1 on a server of eight Gaudi3, from the tests of a monitor in Go.
``GAUDI_CSV``: hl-smi 1.18.0 with ``csv,nounits`` on first-generation cards, from the tests of
github.com/2maz/slurm-monitor; ``GAUDI_TABLE`` is from there too, two processes having been written
into it by hand.
"""

from __future__ import annotations

from pathlib import Path

_DIRECTORY = Path(__file__).parent / "workloads" / "devices" / "recorded_hl_smi"

GAUDI2_TABLE = (_DIRECTORY / "gaudi2.txt").read_text()
GAUDI_TABLE = (_DIRECTORY / "gaudi.txt").read_text()
GAUDI3_CSV = (_DIRECTORY / "gaudi3.csv").read_text()
GAUDI_CSV = (_DIRECTORY / "gaudi.csv").read_text()
