"""Addresses of artifacts: hashes of a step's inputs, not of its output.

An artifact's address is the hash of its kind, its parents' addresses, its configuration and its step's version. It is
known *before* the work, so a finished step is found by lookup. The output files are hashed into the manifest instead.
The name is not part of the address: renaming an artifact rebuilds nothing.

The hash is over canonical JSON: sorted keys, no spaces, UTF-8, no NaN. Tuples and lists are equal after a JSON round
trip; a whole float stays a float.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whorl.errors import ConfigError, StoreError, shorten
from whorl.store.files import require_regular

ADDRESS_DIGITS = 32
MAX_NAME = 100  # letters of a part of a name: file systems allow 255, and folders add a hash or a suffix
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}(/[A-Za-z0-9][A-Za-z0-9_.+-]{0,99})*")


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON of a value. Raises StoreError if JSON cannot represent it."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"a configuration is not valid JSON: {error}",
            expected="strings, finite numbers, booleans, null, lists and tables",
        ) from error
    return text.encode()


def address_of(
    kind: str, parents: Mapping[str, str], config: Mapping[str, Any], version: int, step: str = ""
) -> str:
    """Return the address of an artifact from its inputs. parents: role -> address."""
    inputs = {
        "kind": kind,
        "parents": dict(parents),
        "config": dict(config),
        "version": version,
        "step": step,
    }
    return hashlib.sha256(canonical_json(inputs)).hexdigest()[:ADDRESS_DIGITS]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, read in bounded memory. Raises OSError: it is no regular file."""
    with require_regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def validate_name(name: str) -> str:
    """Return `name` if it can be a path under `names/` on every file system; raise StoreError otherwise."""
    if not NAME_PATTERN.fullmatch(name):
        raise StoreError(
            f"invalid artifact name {shorten(repr(name))}",
            expected="parts joined by '/'; each starts with a letter or digit and has only letters, digits and . _ + -, "
            f"at most {MAX_NAME}",
        )
    return name


def user_path(text: str) -> Path:
    """Return the path that a user has written, with ~ replaced; it need not exist.

    Raises:
        ConfigError: no file can have this path, or its folder may not be read.
    """
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{shorten(repr(text))} is no path: {reason}", expected="a name or a path"
        ) from error
    return path


def read_address(path: Path) -> str | None:
    """Return the address in a name file, or None if it is empty or damaged."""
    text = path.read_bytes().decode("ascii", "replace").strip()
    return text if len(text) == ADDRESS_DIGITS and not set(text) - set("0123456789abcdef") else None
