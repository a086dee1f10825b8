"""The remote side of a store under an fsspec URL (`s3://`, `gs://`, `memory://`, ...).

Work happens in a local folder; this module uploads and downloads it. Object stores cannot rename a folder in one
operation, so an artifact is published as

    artifacts/ADDRESS/manifest.json        the commit point, written last; names its upload
    uploads/ADDRESS/TOKEN/...              the files, under a token of the upload

An unfinished upload, or two concurrent ones, leave garbage that `gc` removes, never a mixture.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from whorl.errors import StoreError
from whorl.store.manifest import Manifest


class Remote:
    """An fsspec location as a flat space of small objects and uploaded files. Raises StoreError for an invalid URL."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            self.fs, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise StoreError(
                f"the store URL {url!r} cannot be used: {error}",
                expected="a folder, or a URL that fsspec supports (memory://, s3://, gs://, ...)",
                do="install the package named in the message, or use a folder",
            ) from error
        self.root = root.rstrip("/")

    def _full_path(self, path: str) -> str:
        return f"{self.root}/{path}"

    def read(self, path: str) -> bytes | None:
        """Return an object's bytes, or None if it does not exist."""
        try:
            return bytes(self.fs.cat_file(self._full_path(path)))
        except FileNotFoundError:
            return None

    def write(self, path: str, data: bytes) -> None:
        self.fs.makedirs(self._full_path(path).rsplit("/", 1)[0], exist_ok=True)
        self.fs.pipe_file(self._full_path(path), data)

    def remove(self, path: str) -> None:
        if self.fs.exists(self._full_path(path)):
            self.fs.rm(self._full_path(path), recursive=True)

    def names(self, folder: str) -> list[str]:
        """Return the paths of all objects under `folder`, relative to it."""
        top = self._full_path(folder)
        if not self.fs.exists(top):
            return []
        stripped = top.strip("/") + "/"
        return sorted(str(found).strip("/").removeprefix(stripped) for found in self.fs.find(top))

    def manifest(self, address: str) -> Manifest | None:
        data = self.read(f"artifacts/{address}/manifest.json")
        if data is None:
            return None
        return Manifest.parse(data, f"{self.url} artifacts/{address}/manifest.json")

    def addresses(self) -> list[str]:
        paths = (path.split("/") for path in self.names("artifacts"))
        return sorted(parts[0] for parts in paths if parts[1:] == ["manifest.json"])

    def push(self, manifest: Manifest, folder: Path) -> None:
        """Upload the files of an artifact, then its manifest."""
        token = uuid.uuid4().hex[:12]
        for name in manifest.files:
            target = self._full_path(f"uploads/{manifest.address}/{token}/{name}")
            self.fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            self.fs.put_file(str(folder / name), target)
        record: dict[str, Any] = json.loads(manifest.to_json())
        record["upload"] = token
        self.write(f"artifacts/{manifest.address}/manifest.json", json.dumps(record).encode())

    def pull(self, address: str, folder: Path) -> Manifest:
        """Download the files of an artifact into `folder` and return its manifest. Raises StoreError if one is lost."""
        data = self.read(f"artifacts/{address}/manifest.json")
        if data is None:
            raise StoreError(f"{self.url} has no artifact {address}")
        manifest = Manifest.parse(data, f"{self.url} artifacts/{address}/manifest.json")
        token = json.loads(data)["upload"]
        for name in manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                self.fs.get_file(self._full_path(f"uploads/{address}/{token}/{name}"), str(folder / name))
            except FileNotFoundError as error:
                raise StoreError(
                    f"{self.url} is missing the file {name} of artifact {manifest.label}",
                    do="run `whorl verify` on that store, then run the recipe again",
                ) from error
        return manifest

    def delete(self, address: str) -> None:
        """Delete an artifact: the manifest first, so that no reader finds a partial artifact."""
        self.remove(f"artifacts/{address}")
        self.remove(f"uploads/{address}")
