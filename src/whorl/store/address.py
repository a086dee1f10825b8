"""Content addresses: what a step is made from, not what came out.

An artifact's address is the hash of its kind, its parents' addresses, its configuration and its step's
version, so that it is known *before* the work and a finished step is found by look-up. What came out is
hashed too, file by file, but into the manifest. The name is not in the address: renaming makes nothing
again.

The hash is over canonical JSON: keys sorted, no spaces, UTF-8, and no value that JSON would write in two ways
(NaN, tuples against lists are settled by a round trip; a float that is whole stays a float).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whorl.errors import StoreError

ADDRESS_DIGITS = 32
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*(/[A-Za-z0-9][A-Za-z0-9_.+-]*)*")


def canonical_json(value: Any) -> bytes:
    """The one way to write a JSON value. Raises StoreError for what JSON cannot hold."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"a configuration cannot be written as JSON: {error}",
            expected="text, finite numbers, true/false, null, lists and tables",
        ) from error
    return text.encode()


def address_of(
    kind: str, parents: Mapping[str, str], config: Mapping[str, Any], version: int, step: str = ""
) -> str:
    """The address of what version `version` of `step` makes: a `kind`, from `parents` (role -> address)."""
    made_from = {
        "kind": kind,
        "parents": dict(parents),
        "config": dict(config),
        "version": version,
        "step": step,
    }
    return hashlib.sha256(canonical_json(made_from)).hexdigest()[:ADDRESS_DIGITS]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def validate_name(name: str) -> str:
    """`name` if it can be a file path under `names/` on every file system; StoreError otherwise."""
    if not NAME_PATTERN.fullmatch(name):
        raise StoreError(
            f"{name!r} cannot name an artifact",
            expected="parts joined by '/', of letters, digits and . _ + -, starting with a letter or digit",
        )
    return name
