"""Encrypted weight files, decrypted into memory only.

``nightgrid protect`` writes config and tokenizer in the clear and each weight file as
``model.safetensors.protected``: a header and pieces of 4 MiB, each sealed by AES-256-GCM under a
key of this file (HKDF-SHA256 of the key and a random salt). A piece's nonce is its number and
whether it is the last; every seal authenticates the header with the file's name and length. So
altered, missing, moved or foreign pieces are rejected. The header's empty seal tells a wrong key
from a damaged file.

The key is never transmitted: every node reads it from a file (``--key-file``) of 64 hexadecimal
digits, accessible to its owner only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from workloads.base import BadConfiguration, DataMissing, Metric
from workloads.inspection.checkpoints import (
    PROTECTED,
    SIDE_FILE_BYTES,
    TEXT_FILES,
    protected_files,
    read_config,
    weight_files,
)
from workloads.util import files
from workloads.util.processes import variables

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: Variable with the path of this node's key file.
VARIABLE = "NIGHTGRID_KEY_FILE"
PIECE_BYTES = 4 * files.MIB
_KEY_BYTES = 32
_MAGIC = b"nightgrid protected 1\n"
_SEAL_BYTES = 16
_FIXED = struct.Struct(">32sIQH")  # salt, piece size, lengths of content and name
_HEADER_SEAL = b"\xff" * 12  # a nonce that no piece has

METRICS = (
    Metric(
        name="decryption_s",
        title="opened in",
        unit="s",
        description="Seconds of loading in which protected weight files were read and decrypted.",
        better="lower",
        ranks="largest",
    ),
)


class Opening:
    """Decrypts weight files with one key and measures the time."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.seconds = 0.0

    def state_dict(self, directory: Path) -> dict[str, Any]:
        """Return all tensors of a directory's encrypted weight files, on the CPU."""
        from safetensors.torch import load

        tensors: dict[str, Any] = {}
        for file in weight_files(directory, protected=True):
            began = time.perf_counter()
            content = bytes(read(file, self._key))
            self.seconds += time.perf_counter() - began
            tensors |= load(content)
        return tensors


# ---------------------------------------------------------------- keys


def write_key(file: Path) -> None:
    """Write a new random key into a new file of mode 0600; OSError if it exists."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as opened:
        opened.write(secrets.token_hex(_KEY_BYTES) + "\n")


def read_key(file: Path) -> bytes:
    """Read a key; raises BadConfiguration if unreadable, open to others or malformed."""
    try:
        with files.opened(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(1024)
    except OSError as error:
        raise BadConfiguration(f"the key file {file} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise BadConfiguration(
            f"the key file {file} may be read or written by others "
            f"(mode {stat.S_IMODE(mode):04o}): chmod 600 {file}"
        )
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(text.decode("ascii"))
        if len(key) == _KEY_BYTES:
            return key
    raise BadConfiguration(
        f"the key file {file} holds no key: {2 * _KEY_BYTES} hexadecimal digits are wanted, as "
        "`nightgrid protect --new-key` writes them"
    )


def key_named(file: Path | None) -> AbstractContextManager[None]:
    """Set the key file during the block, also for ``passed_on``; None keeps the environment's."""
    return variables({VARIABLE: str(file)} if file is not None else {})


def passed_on() -> Mapping[str, str]:
    """Return the key file's path, never the key, for the environment of remote processes."""
    return {VARIABLE: os.environ[VARIABLE]} if os.environ.get(VARIABLE) else {}


def opening_for(directory: Path) -> Opening | None:
    """Return a decrypter, None if not encrypted; raises BadConfiguration without a key file."""
    if not protected_files(directory):
        return None
    named = os.environ.get(VARIABLE, "")
    if not named:
        raise BadConfiguration(
            f"the weights in {directory} are protected: name the file of their key, "
            "`nightgrid run --key-file FILE`"
        )
    return Opening(read_key(Path(named)))


# ---------------------------------------------------------------- files


def protect(source: Path, destination: Path, key: bytes) -> tuple[list[Path], list[str]]:
    """Copy a model's directory to a new one with its safetensors files encrypted by a 32-byte key.

    Returns the written files, and names of those left out (weights in other forms, in the clear).
    Raises DataMissing without such weights, and BadConfiguration if the destination exists. A
    failed copy is removed again.
    """
    read_config(source)
    weights = weight_files(source)
    if any(file.suffix != ".safetensors" for file in weights):
        raise DataMissing(
            f"{source} has weights in .bin files, which are not protected: save the model as "
            "safetensors first"
        )
    if os.path.lexists(destination):
        raise BadConfiguration(f"{destination} exists already: name a new directory")
    destination.mkdir(parents=True, mode=0o700)
    try:
        for file in sorted(source.iterdir()):
            if file in weights:
                with file.open("rb") as content:
                    write(destination / f"{file.name}{PROTECTED}", content, key)
            elif file.suffix in TEXT_FILES and file.is_file():
                text = files.read_bytes(file, limit_bytes=SIDE_FILE_BYTES)
                (destination / file.name).write_bytes(text)
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise
    written = sorted(destination.iterdir())
    known = {file.name.removesuffix(PROTECTED) for file in written}
    return written, sorted(file.name for file in source.iterdir() if file.name not in known)


def write(file: Path, content: BinaryIO, key: bytes) -> None:
    """Encrypt content, read piece by piece from its beginning, into a new file."""
    length = content.seek(0, os.SEEK_END)
    content.seek(0)
    name = file.name.encode()
    salt = secrets.token_bytes(32)
    header = _MAGIC + _FIXED.pack(salt, PIECE_BYTES, length, len(name)) + name
    cipher, bound = _cipher(key, salt), hashlib.sha256(header).digest()
    with file.open("xb") as out:
        out.write(header)
        out.write(cipher.encrypt(_HEADER_SEAL, b"", bound))
        for nonce, size in _pieces(length, PIECE_BYTES):
            out.write(cipher.encrypt(nonce, content.read(size), bound))
        if content.tell() != length or content.read(1):
            raise OSError(f"{file.name.removesuffix(PROTECTED)} changed while it was protected")
        out.flush()
        os.fsync(out.fileno())


def read(file: Path, key: bytes) -> bytearray:
    """Decrypt a file in memory; raises DataMissing if it is invalid or the key is wrong."""
    try:
        with files.opened(file) as stored:
            header, salt, piece_bytes, length = _header(file, stored)
            count = max(1, -(-length // piece_bytes))  # what an altered header says, until compared
            whole = len(header) + length + (1 + count) * _SEAL_BYTES
            there = os.fstat(stored.fileno()).st_size
            if there != whole:
                raise DataMissing(f"{file} has {there:,} of its {whole:,} bytes: copy it again")
            cipher, bound = _cipher(key, salt), hashlib.sha256(header).digest()
            from cryptography.exceptions import InvalidTag

            problem = "was not protected with this key, or its beginning was altered"
            content = bytearray()
            try:
                cipher.decrypt(_HEADER_SEAL, stored.read(_SEAL_BYTES), bound)
                for number, (nonce, size) in enumerate(_pieces(length, piece_bytes), start=1):
                    problem = f"was altered: piece {number} of {count} does not open"
                    content += cipher.decrypt(nonce, stored.read(size + _SEAL_BYTES), bound)
            except InvalidTag as error:
                raise DataMissing(f"{file} {problem}") from error
            return content
    except OSError as error:
        raise DataMissing(f"{file} cannot be read: {error.strerror or error}") from error


def _header(file: Path, stored: BinaryIO) -> tuple[bytes, bytes, int, int]:
    """Return the header without its seal, then salt, piece size and content length."""
    start = stored.read(len(_MAGIC) + _FIXED.size)
    if not start.startswith(_MAGIC) or len(start) < len(_MAGIC) + _FIXED.size:
        raise DataMissing(f"{file} is no protected file of this version")
    salt, piece_bytes, length, name_bytes = _FIXED.unpack(start[len(_MAGIC) :])
    name = stored.read(name_bytes)
    if name != file.name.encode():
        was = name.decode(errors="replace")
        raise DataMissing(f"{file} was {was} when it was protected: give it its name back")
    if not 0 < piece_bytes <= 64 * files.MIB:
        raise DataMissing(f"{file} was altered: it tells of pieces of {piece_bytes:,} bytes")
    return start + name, salt, piece_bytes, length


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    if importlib.util.find_spec("cryptography") is None:
        raise DataMissing("protected files need the package cryptography: pip install cryptography")
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived = HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"nightgrid model file")
    return AESGCM(derived.derive(key))


def _pieces(length: int, piece_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield nonce and size of each piece; the nonce is its number and whether it is the last."""
    starts = range(0, max(1, length), piece_bytes)
    for number, start in enumerate(starts):
        last = number == len(starts) - 1
        yield number.to_bytes(11, "big") + bytes([last]), min(piece_bytes, length - start)
