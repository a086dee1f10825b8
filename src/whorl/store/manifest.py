"""The manifest: the file that makes a folder an artifact.

It holds kind, name, parents, configuration and step version, which the address covers, and the hash and size of every
file, which the address does not cover (see `address`). It also holds its own hash, so that a damaged manifest is
detected.
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
    """Contents of `manifest.json`. `files` maps a relative path to {"sha256": hex, "size": bytes}."""

    address: str
    kind: str
    name: str
    step: str  # name of the step; two steps may build the same kind
    version: int
    config: dict[str, Any]
    parents: dict[str, str]  # role -> address
    summary: dict[str, Any]
    created: float  # seconds since the epoch
    seconds: float  # wall-clock time of the finished build
    files: dict[str, dict[str, Any]]

    @property
    def label(self) -> str:
        """Name and short address for messages: `quickstart/tokens (3f2a90c1)`."""
        return f"{self.name or self.kind} ({self.address[:8]})"

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(int(file["size"]) for file in self.files.values())

    def to_json(self) -> str:
        record = {"format": FORMAT, **asdict(self)}
        return json.dumps({**record, "sha256": _digest(record)}, indent=1, ensure_ascii=False)

    @classmethod
    def parse(cls, data: bytes, location: str) -> Manifest:
        """Parse and check a manifest. Raises CorruptArtifactError that names `location`."""
        try:
            record = json.loads(data)
            claimed = record.pop("sha256")
            record.pop("upload", None)  # location of the files in a remote store; not covered by the hash
            if _digest(record) != claimed or record.pop("format") != FORMAT:
                raise ValueError("the content does not match its hash")
            manifest = cls(**record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptArtifactError(
                f"the manifest {location} is damaged: {error}",
                do="run the recipe again: it quarantines this artifact",
            ) from error
        inputs = (manifest.kind, manifest.parents, manifest.config, manifest.version, manifest.step)
        if address_of(*inputs) != manifest.address:
            raise CorruptArtifactError(f"the manifest {location} does not match its address")
        return manifest


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(record)).hexdigest()
