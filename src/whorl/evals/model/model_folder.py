"""The folder of a model under evaluation, and the address of its responses.

A model is an artifact of the store, or a folder with config.json, as Whorl or `transformers` wrote it. The address of an
artifact's responses is that of the artifact; that of a folder is a hash of its files. Both are extended by what changes a
response: the type of the weights, the length, whether bos is added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whorl.errors import ConfigError
from whorl.models.lora import ADAPTER
from whorl.store import Artifact, Store
from whorl.store.address import canonical_json, file_sha256

FOLDER_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt", ".bin")


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder, its name, and the address of its files."""

    path: Path
    name: str
    address: str

    @classmethod
    def open(cls, ref: str | Path, store: str | None = None) -> ModelFolder:
        """Find an artifact by name or address, or a folder.

        Raises:
            StoreError: no such artifact. ConfigError: it is not a model.
        """
        folder = Path(ref).expanduser()
        if (folder / "config.json").is_file():
            return cls(folder, folder.resolve().name, hash_folder(folder))
        artifact = find_model(ref, store)
        artifact.check()
        return cls(artifact.path, artifact.name, artifact.address)


def find_model(ref: str | Path, store: str | None = None) -> Artifact:
    """Find a model in the store, without a check of its files.

    Raises:
        StoreError: no such artifact. ConfigError: it is not a model.
    """
    artifact = Store(store).open(str(ref))
    if artifact.kind != "model":
        raise ConfigError(
            f"{artifact.name} is of the kind {artifact.kind}",
            expected="a model",
            do="list artifacts with `whorl ls`",
        )
    return artifact


def hash_folder(folder: Path) -> str:
    """Return a hash of the names and contents of a model's files, and of its adapter's."""
    every = [*folder.iterdir(), *(folder / ADAPTER).glob("*")]
    files = sorted(f for f in every if f.is_file() and f.suffix in FOLDER_SUFFIXES)
    hashes = {str(file.relative_to(folder)): file_sha256(file) for file in files}
    return "folder-" + hashlib.sha256(canonical_json(hashes)).hexdigest()[:32]


def extend_address(address: str, settings: Mapping[str, Any]) -> str:
    """Return the address of a model's responses under `settings`."""
    return address + "-" + hashlib.sha256(canonical_json(dict(settings))).hexdigest()[:16]
