"""The manifest: the one small file that makes a folder an artifact.

It names kind, name, parents, configuration and step version (which the address covers), and the hash and
size of every file (which the address does not: see `address`). It carries a hash of itself, so that a
damaged summary or configuration is found like a damaged file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from whorl.errors import CorruptArtifactError
from whorl.store.address import address_of, canonical_json

FORMAT = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds. `files` maps a relative path to {"sha256": hex, "size": bytes}."""

    address: str
    kind: str
    name: str
    step: str  # what made it: two steps may make the same kind
    version: int
    config: dict[str, Any]
    parents: dict[str, str]  # role -> address
    summary: dict[str, Any]
    created: float  # seconds since the epoch
    seconds: float  # wall-clock of the build that finished
    files: dict[str, dict[str, Any]]

    @property
    def label(self) -> str:
        """How messages call it: `quickstart/tokens (3f2a90c1)`."""
        return f"{self.name or self.kind} ({self.address[:8]})"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(int(file["size"]) for file in self.files.values())

    def to_json(self) -> str:
        record = {"format": FORMAT, **asdict(self)}
        return json.dumps({**record, "sha256": _digest(record)}, indent=1, ensure_ascii=False)

    @classmethod
    def parse(cls, data: bytes, location: str) -> Manifest:
        """Read and check a manifest. Raises CorruptArtifactError that names `where`."""
        try:
            record = json.loads(data)
            claimed = record.pop("sha256")
            record.pop("upload", None)  # where a remote store keeps the files: not part of what was made
            if _digest(record) != claimed or record.pop("format") != FORMAT:
                raise ValueError("its content does not match its own hash")
            manifest = cls(**record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptArtifactError(
                f"the manifest {location} is damaged: {error}",
                do="run the recipe again: it sets this one aside",
            ) from error
        made_from = (manifest.kind, manifest.parents, manifest.config, manifest.version, manifest.step)
        if address_of(*made_from) != manifest.address:
            raise CorruptArtifactError(f"the manifest {location} does not belong to its address")
        return manifest


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(record)).hexdigest()
