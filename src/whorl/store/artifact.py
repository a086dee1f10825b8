"""A finished artifact: a manifest, a local folder, and files that are checked before use.

Hashing gigabytes on every read would cost more than the read. The default check is therefore cheap: the size must match
the manifest, and the modification time must match the time of the last hash. These times are stored outside the
artifact, in `verified/ADDRESS.json`. A file with another time is hashed again. So a copied store is slow once, and an
edited file is detected. `whorl verify` detects damage that changes neither size nor time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from whorl.errors import CorruptArtifactError, StoreError, one_of
from whorl.files import write_atomic
from whorl.store.address import file_sha256
from whorl.store.manifest import Manifest


class Artifact:
    """A finished artifact. `path` is its local folder; `file` returns a checked path of one file.

    Attributes:
        address, kind, name, step, version, config, parents, summary, created, seconds, files: see `Manifest`.
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
        """Return the local folder. For a store under a URL, download it first if it is missing."""
        return self._folder(self.address)

    def file(self, name: str) -> Path:
        """Return the path of one file after the cheap check.

        Raises:
            StoreError: the artifact has no such file.
            CorruptArtifactError: the file is missing or differs from the manifest.
        """
        if name not in self.files:
            raise StoreError(f"{self.label} has no file {name!r}", expected=one_of(name, sorted(self.files)))
        self._check([name], full=False)
        return self.path / name

    def check(self, *, full: bool = False) -> None:
        """Check every file, cheaply or by hashing. Raises CorruptArtifactError at the first damaged file."""
        self._check(sorted(self.files), full=full)

    def find_damage(self) -> list[str]:
        """Hash every file; return one sentence per file that differs from the manifest or is not part of it."""
        problems = []
        for name in sorted(self.files):
            try:
                self._check([name], full=True)
            except CorruptArtifactError as error:
                problems.append(error.what)
        for extra in sorted(set(relative_files(self.path)) - set(self.files)):
            problems.append(f"{self.label}: {self.path / extra} is not part of the artifact")
        return problems

    def _check(self, names: list[str], *, full: bool) -> None:
        folder, mtimes = self.path, self._read_mtimes()
        changed = False
        for name in names:
            path, expected = folder / name, self.files[name]
            try:
                status = path.stat()
            except OSError as error:
                raise self._corrupt(path, "is missing") from error
            if status.st_size != expected["size"]:
                raise self._corrupt(path, f"has {status.st_size:,} bytes instead of {expected['size']:,}")
            if not full and mtimes.get(name) == status.st_mtime_ns:
                continue
            if file_sha256(path) != expected["sha256"]:
                raise self._corrupt(path, "differs from the published content")
            changed |= mtimes.get(name) != status.st_mtime_ns
            mtimes[name] = status.st_mtime_ns
        if changed:
            self.record_mtimes(mtimes)

    def _corrupt(self, path: Path, damage: str) -> CorruptArtifactError:
        return CorruptArtifactError(
            f"artifact {self.label} is damaged: {path} {damage}",
            do="run the recipe again (it quarantines the damaged artifact and rebuilds it); "
            "`whorl verify` lists all damage",
        )

    def _read_mtimes(self) -> dict[str, int]:
        try:
            return dict(json.loads(self._mtime_cache.read_text()))
        except (OSError, ValueError):
            return {}

    def record_mtimes(self, times: dict[str, int]) -> None:
        """Store the modification times at which the files were last hashed. Does nothing in a read-only store."""
        with suppress(OSError):
            write_atomic(self._mtime_cache, json.dumps(times))


def relative_files(folder: Path) -> dict[str, os.stat_result]:
    """Return the status of every file under `folder` except the manifest, by relative path with '/' separators."""
    files: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path.stat()
    files.pop("manifest.json", None)
    return files
