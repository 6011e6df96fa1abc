"""A token of one's own for a block, and the user's before and after it; no Ray runs here."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.errors import ClusterError
from orchestrator.on_ray.cluster import MODE, TOKEN, TOKEN_PATH, new_token, ray_environment

ROOT = Path(__file__).resolve().parents[2]

#: Prints what this process would send: at first, in two blocks one after another, at the end.
_PROGRAM = """
import json, os, sys
from pathlib import Path
from orchestrator.on_ray.cluster import new_token, ray_environment, take_own_token
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode

def sent():
    if get_authentication_mode() != AuthenticationMode.TOKEN:
        return "nothing"
    (header,) = AuthenticationTokenLoader.instance().get_token_for_http_header().values()
    return header

take_own_token()
told = [sent()]
for name in ("one", "two"):
    place = Path(sys.argv[1]) / name
    place.mkdir()
    before = dict(os.environ)
    with ray_environment(new_token(place)):
        told.append(sent() == "Bearer " + (place / "token").read_text())
    assert dict(os.environ) == before
    told.append(sent())
print(json.dumps(told))
"""


def sends(directory: Path, **variables: str) -> list[str | bool]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(directory)],
        env=kept | {"PYTHONPATH": str(ROOT), "HOME": str(directory)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told: list[str | bool] = json.loads(done.stdout)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("users", ["none", "kept by Ray", "variable", "path", "gone"])
def test_clusters_one_after_another_have_tokens_of_their_own(tmp_path: Path, users: str) -> None:
    """Ray sends each one's within its block, and the user's own before and afterwards, wherever
    that is kept. Where it is nowhere, Ray is not asked for it: it would abort the process."""
    mine = "a" * 64
    variables = {}
    if users == "kept by Ray":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(mine)
    elif users == "variable":
        variables = {MODE: "token", TOKEN: mine}
    elif users == "path":
        (tmp_path / "mine").write_text(mine)
        variables = {MODE: "token", TOKEN_PATH: str(tmp_path / "mine")}
    elif users == "gone":
        variables = {MODE: "disabled", TOKEN_PATH: "/none"}
    own = "nothing" if users in ("none", "gone") else f"Bearer {mine}"
    assert sends(tmp_path, **variables) == [own, True, own, True, own]


def test_a_token_is_random_and_for_this_user_alone(tmp_path: Path) -> None:
    """Nobody's umask matters, and no file that is there is overwritten."""
    (tmp_path / "second").mkdir()
    before = os.umask(0)
    try:
        variables = new_token(tmp_path)
    finally:
        os.umask(before)
    path = Path(variables[TOKEN_PATH] or "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = Path(new_token(tmp_path / "second")[TOKEN_PATH] or "")
    assert len(path.read_text()) == 64 and path.read_text() != other.read_text()
    assert variables[TOKEN] is None  # which would go before the file
    with pytest.raises(FileExistsError):
        new_token(tmp_path)


def test_a_ray_that_knows_no_tokens_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open cluster is no way out; the version that is needed is named."""
    import ray._raylet

    monkeypatch.delattr(ray._raylet, "AuthenticationTokenLoader")
    before = dict(os.environ)
    with (
        pytest.raises(ClusterError, match=r"install Ray 2\.52 or later"),
        ray_environment(new_token(tmp_path)),
    ):
        pytest.fail("it went on")
    assert dict(os.environ) == before
