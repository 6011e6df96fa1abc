"""cluster.yaml is a file that Ray's own launcher accepts."""

from __future__ import annotations

from pathlib import Path

import yaml

CLUSTER = Path(__file__).resolve().parent.parent / "cluster.yaml"


def test_the_cluster_launcher_accepts_cluster_yaml() -> None:
    """Ray's validator finds nothing wrong, with its defaults filled in."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load(CLUSTER.read_text())))


def test_every_node_declares_its_eight_cards() -> None:
    """The local provider knows no node types, so each start command names the HPUs."""
    config = yaml.safe_load(CLUSTER.read_text())
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert '"HPU": 8' in commands[-1]


def test_the_dashboard_listens_on_loopback_only() -> None:
    """Ray's job API runs code for whoever reaches it."""
    config = yaml.safe_load(CLUSTER.read_text())
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]
