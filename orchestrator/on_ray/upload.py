"""Files uploaded with a submitted grid: the program, the grid, and the files that the grid names.

A submission is staged in a directory of its own: the two packages, the grid, its models, datasets
and adapters with relative paths (absolute ones are the cluster's), and ``--include``. Files named
like secrets (``.env``, ``id_rsa``, ``*.pem``) are uploaded only if each is named explicitly.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from orchestrator.core.errors import SubmitError
from orchestrator.core.job import Job
from orchestrator.grid import SHIPPED_GRIDS
from orchestrator.grid.dependencies import things
from orchestrator.worker.orphans import private_directory
from workloads.data import datasets
from workloads.models import catalog as models

PACKAGES = ("orchestrator", "workloads")
#: Most bytes that a grid and what it names may have: Ray copies them to every node that needs them.
MOST_BYTES = 100_000_000
#: Directories in which nothing is of use to a job, wherever they are.
_SKIPPED = {"__pycache__", ".git", ".hg", ".svn", ".venv", ".mypy_cache", ".pytest_cache"}
#: Names of files that hold secrets, in lower case.
SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".my.cnf", ".boto"),
    *(".git-credentials", ".npmrc", ".pypirc", ".dockercfg", ".htpasswd", ".s3cfg", ".vault-token"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk", "*.p12"),
    *("*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.token", "auth_token", "token", "token.txt"),
    *("credentials", "credentials.*", "secrets.*", "secret.*", "client_secret*.json"),
    *("service[-_]account*.json", "application_default_credentials.json", "kubeconfig"),
    *(".bash_history", ".zsh_history", ".python_history"),
)
SECRET_DIRECTORIES = {
    *(".ssh", ".aws", ".gnupg", ".kube", ".docker", ".azure", ".gcloud", "gcloud", ".ray"),
    *(".password-store", ".huggingface"),
}
_MEANT_FOR_ALL = ("*.pub", "*.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """Files to upload, by their names beneath the job's working directory."""

    program: Mapping[str, Path]
    named: Mapping[str, Path]  # the grid, and what it or the user names

    @property
    def files(self) -> dict[str, Path]:
        """All of them."""
        return {**self.program, **self.named}

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self.files.values())

    def text(self) -> str:
        """Describe the upload in one line."""
        shown = [*self.named][:6]
        more = [f"{len(self.named) - 6} more"] if len(self.named) > 6 else []
        count, size = len(self.files), self.size_bytes / 1e6
        return f"uploads {count} files, {size:.1f} MB: the program, {', '.join([*shown, *more])}"

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """A directory that holds these files and nothing else, while the block runs."""
        with private_directory() as directory:
            for name, path in self.files.items():
                to = directory / name
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)
            yield directory


def upload_of(
    grid: Path, jobs: Iterable[Job], working_dir: Path, include: Sequence[str] = ()
) -> Upload:
    """Collect the files of ``working_dir`` that a grid needs.

    Raises SubmitError for files named like secrets or outside of ``working_dir``, for a home
    directory or the root, and for unreadable files.
    """
    root = working_dir.resolve()
    named = {name_there(grid, working_dir): grid}
    for path in (*include, *_named_by(jobs, root)):
        named |= _files_of(path, root)
    included = {
        Path(os.path.normpath(root / name)).relative_to(root).as_posix() for name in include
    }
    secret = sorted(name for name in named if is_secret_file(name) and name not in included)
    if secret:
        raise SubmitError(
            f"not uploaded, since they are named as secrets are: {', '.join(secret[:10])}. Move "
            f"them elsewhere, or name each that is meant to go: --include {secret[0]}"
        )
    sizes = {name: path.stat().st_size for name, path in named.items()}
    if (total := sum(sizes.values())) > MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        place = os.path.dirname(largest) or largest
        raise SubmitError(
            f"{total / 1e6:,.0f} MB would be uploaded ({largest} alone has "
            f"{sizes[largest] / 1e6:,.0f} MB), and {MOST_BYTES / 1e6:.0f} MB is the most: put "
            f"{place} where the cluster's nodes see it and write its absolute path into the grid"
        )
    return Upload(program=program_files(root), named=named)


def name_there(grid: Path, working_dir: Path) -> str:
    """The grid's name in the directory of the job: of a shipped grid its own, of others that
    beneath ``working_dir``; SubmitError for one outside of it."""
    root, real = working_dir.resolve(), grid.resolve()
    if real.is_relative_to(root):
        return real.relative_to(root).as_posix()
    if grid.parent == SHIPPED_GRIDS:
        return grid.name
    raise SubmitError(
        f"{grid} is outside the directory that is uploaded, {root}; copy it there, or give "
        "--working-dir"
    )


def program_files(root: Path | None = None) -> dict[str, Path]:
    """The program's files, of the checkout ``root`` if it is one, else of this installation."""
    home = Path(__file__).resolve().parents[2]
    if root is not None and (root / "orchestrator" / "__main__.py").is_file():
        home = root
    files: dict[str, Path] = {}
    for package in PACKAGES:
        for path in _walk(home / package):
            name = path.relative_to(home).as_posix()
            if not path.name.startswith(".") and path.suffix != ".pyc" and not is_secret_file(name):
                files[name] = path
    return files


def is_secret_file(name: str) -> bool:
    """Return whether a file of this path is likely to hold a secret."""
    path = PurePosixPath(name.lower())
    if SECRET_DIRECTORIES & set(path.parts[:-1]):
        return True
    if any(fnmatch(path.name, pattern) for pattern in _MEANT_FOR_ALL):
        return False
    return any(fnmatch(path.name, pattern) for pattern in SECRET_FILES)


def _named_by(jobs: Iterable[Job], root: Path) -> list[str]:
    """Existing models, datasets and adapters that jobs name by a relative path."""
    jobs = list(jobs)
    made = {thing for _, _, thing in things(jobs, "produces")}
    names = {thing[1] for _, _, thing in things(jobs, "consumes") if thing not in made}
    names -= {*models.EMBEDDED, *datasets.EMBEDDED}
    present = []
    for name in sorted(filter(None, names)):
        if "\0" in name or name.startswith("~") or os.path.isabs(name):
            continue
        try:
            if (root / name).exists():
                present.append(name)
        except OSError:  # a name too long for the file system
            continue
    return present


def _files_of(name: str, root: Path) -> dict[str, Path]:
    """The file of this name, or all of the directory, by their names beneath ``root``."""
    path = Path(os.path.normpath(root / name))
    real = path.resolve()
    home = Path.home().resolve()
    if real == Path(real.anchor) or real == home or real in home.parents:
        raise SubmitError(f"{name} is {real}: a home directory or more is not uploaded")
    if not path.is_relative_to(root) or not real.is_relative_to(root):
        raise SubmitError(
            f"{name} is outside the directory that is uploaded from, {root}; copy it there, or "
            "give --working-dir"
        )
    if path.is_file():
        return {path.relative_to(root).as_posix(): path}
    if not path.is_dir():
        raise SubmitError(f"{name}: there is no such file or directory in {root}")
    files = {}
    for file in _walk(path):
        if not file.resolve().is_relative_to(root):
            raise SubmitError(f"{file} is a link to {file.resolve()}, outside of {root}")
        inside = file.relative_to(root).as_posix()
        target = file.resolve().relative_to(root).as_posix()
        if is_secret_file(target) and not is_secret_file(inside):
            raise SubmitError(f"{file} is a link to {target}, which is named as secrets are")
        files[inside] = file
    return files


def _walk(directory: Path) -> Iterator[Path]:
    """The regular files beneath a directory, in order; links to directories are not followed."""
    for here, directories, names in os.walk(directory):
        directories[:] = sorted(set(directories) - _SKIPPED)
        for name in sorted(names):
            path = Path(here, name)
            if path.is_file():
                yield path
