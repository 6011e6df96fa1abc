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


def test_every_node_asks_for_the_token() -> None:
    """Ray's token is on in all containers, and the workstation's copy goes to where Ray looks."""
    config = yaml.safe_load(CLUSTER.read_text())
    assert "-e RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert config["file_mounts"] == {"/root/.ray/auth_token": "~/.ray/auth_token"}


def test_no_node_listens_for_jobs_on_the_network() -> None:
    """No start command opens the dashboard, with its job interface, to other hosts."""
    config = yaml.safe_load(CLUSTER.read_text())
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    hosts = [
        word.partition("=")[2]
        for command in commands
        for word in command.split()
        if word.startswith("--dashboard-host")
    ]
    assert hosts == ["127.0.0.1"]
