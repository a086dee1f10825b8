"""An artifact as its readers see it: a manifest, a local folder, and files that are checked before they are
used.

Hashing gigabytes at every read would cost more than the reading, so the check is cheap by default: the size
must be the manifest's, and the modification time the one remembered when the file was last hashed (in a
sidecar outside the artifact, `verified/ADDRESS.json`). A file whose time differs is hashed once more: a copied
store is slow once, an edited file is found. Damage that changes neither size nor time is what `whorl
verify` is for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whorl.errors import CorruptArtifactError, StoreError, one_of
from whorl.store.address import file_sha256
from whorl.store.manifest import Manifest


class Artifact:
    """A finished artifact. `path` is its local folder; take files through `file`, which checks them.

    Attributes:
        address, kind, name, step, version, config, parents, summary, created, seconds, files: as in
        `Manifest`.
    """

    def __init__(self, manifest: Manifest, folder: Callable[[str], Path], mtime_cache: Path) -> None:
        self.manifest = manifest
        self.address, self.kind, self.name = manifest.address, manifest.kind, manifest.name
        self.step, self.version = manifest.step, manifest.version
        self.config, self.parents = manifest.config, manifest.parents
        self.summary, self.files = manifest.summary, manifest.files
        self.created, self.seconds = manifest.created, manifest.seconds
        self._folder, self._mtime_cache = folder, mtime_cache

    @property
    def label(self) -> str:
        return self.manifest.label

    @property
    def path(self) -> Path:
        """The local folder (of a store under a URL: downloaded now if it is not here yet)."""
        return self._folder(self.address)

    def file(self, name: str) -> Path:
        """The path of one file, checked cheaply.

        Raises:
            StoreError: the artifact has no such file.
            CorruptArtifactError: the file is missing or is not what the manifest says.
        """
        if name not in self.files:
            raise StoreError(f"{self.label} has no file {name!r}", expected=one_of(name, sorted(self.files)))
        self._check([name], full=False)
        return self.path / name

    def check(self, *, full: bool = False) -> None:
        """Check every file, cheaply or by hashing all of it. Raises CorruptArtifactError at the first bad
        one.
        """
        self._check(sorted(self.files), full=full)

    def find_damage(self) -> list[str]:
        """Every file that is not what the manifest says, found by hashing all of them; and files too many."""
        found = []
        for name in sorted(self.files):
            try:
                self._check([name], full=True)
            except CorruptArtifactError as error:
                found.append(error.what)
        for extra in sorted(set(relative_files(self.path)) - set(self.files)):
            found.append(f"{self.label}: {self.path / extra} does not belong to it")
        return found

    def _check(self, names: list[str], *, full: bool) -> None:
        folder, seen = self.path, self._read_mtimes()
        learned = False
        for name in names:
            path, wanted = folder / name, self.files[name]
            try:
                status = path.stat()
            except OSError as error:
                raise self._corrupt(path, "is missing") from error
            if status.st_size != wanted["size"]:
                raise self._corrupt(path, f"has {status.st_size:,} bytes instead of {wanted['size']:,}")
            if not full and seen.get(name) == status.st_mtime_ns:
                continue
            if file_sha256(path) != wanted["sha256"]:
                raise self._corrupt(path, "is not the content that was published")
            learned |= seen.get(name) != status.st_mtime_ns
            seen[name] = status.st_mtime_ns
        if learned:
            self.record_mtimes(seen)

    def _corrupt(self, path: Path, what: str) -> CorruptArtifactError:
        return CorruptArtifactError(
            f"artifact {self.label} is damaged: {path} {what}",
            do="run the recipe again (it sets the damaged artifact aside and makes it anew); "
            "`whorl verify` lists all damage",
        )

    def _read_mtimes(self) -> dict[str, int]:
        try:
            return dict(json.loads(self._mtime_cache.read_text()))
        except (OSError, ValueError):
            return {}

    def record_mtimes(self, times: dict[str, int]) -> None:
        """Note the modification times at which the content was known good; without effect in a read-only
        store.
        """
        aside = self._mtime_cache.with_suffix(f".{os.getpid()}")
        try:
            aside.write_text(json.dumps(times))
            aside.replace(self._mtime_cache)
        except OSError:
            aside.unlink(missing_ok=True) if os.access(aside.parent, os.W_OK) else None


def relative_files(folder: Path) -> dict[str, os.stat_result]:
    """Every file under `folder` but the manifest, by its path relative to it ('/' between parts)."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = path.stat()
    found.pop("manifest.json", None)
    return found
