"""Build one artifact atomically: lock, stage, hash, publish.

    lock the address -> empty staging folder -> the step writes -> hash and fsync -> manifest -> one rename

The rename is the commit point. A crash before it publishes nothing; the next builder empties the staging folder. The
scratch folder survives a crash, so a long step stores its checkpoints there and resumes from them. Publishing deletes
it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from whorl.errors import CorruptArtifactError, StoreError
from whorl.files import fsync_path
from whorl.store.address import address_of, file_sha256, validate_name
from whorl.store.artifact import Artifact, relative_files
from whorl.store.lock import FileLock, HeartbeatLock
from whorl.store.manifest import FILE_NAME, Manifest
from whorl.store.store import Store


class Build:
    """Context manager that builds one artifact or finds it.

    Entering waits while another live process builds the same artifact, and reports this through `on_message`.

    Raises (on entering or leaving):
        DiskFullError, StoreError: the store's disk is full or not writable.

    Attributes:
        existing: the artifact if it already exists; then the body has no work.
        path: empty folder for the files.
        summary: JSON for the manifest (counts, metrics); not part of the address.
        artifact: the built or found artifact, set when the body has ended.
    """

    def __init__(
        self,
        store: Store,
        *,
        kind: str,
        name: str,
        parents: Mapping[str, Artifact],
        config: Mapping[str, Any],
        version: int,
        step: str = "",
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        self.store, self.kind, self.name = store, kind, validate_name(name)
        self.parents = {role: parent.address for role, parent in parents.items()}
        self.config, self.version = dict(config), version
        self.address = address_of(kind, self.parents, self.config, version, step)
        self.step = step
        self.path = store.root / "staging" / self.address
        self.summary: dict[str, Any] = {}
        self.existing: Artifact | None = None
        self.artifact: Artifact | None = None
        self._on_message = on_message or (lambda text: None)
        self._lock: FileLock | None = None
        self._remote_lock: HeartbeatLock | None = None
        self._start_time = 0.0

    @property
    def scratch(self) -> Path:
        """Return this address's folder that survives crashes until the artifact is published."""
        folder = self.store.root / "scratch" / self.address
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def resumed(self) -> bool:
        """Return whether an earlier, unfinished build left files in `scratch`."""
        folder = self.store.root / "scratch" / self.address
        return folder.is_dir() and any(folder.iterdir())

    def __enter__(self) -> Build:
        self._start_time = time.monotonic()
        if self._look_up():  # before any lock, so that a finished artifact of a read-only store works
            return self
        try:
            self.store.make_folders()
            self._lock = FileLock(self.store.root / "locks" / self.address)
            parents = sorted(self.parents.values())
            self._lock.wait(
                info={"parents": parents}, on_wait=lambda text: self._on_message(f"{self.name}: {text}")
            )
            if self.store.remote is not None:
                self._remote_lock = HeartbeatLock(self.store.remote, f"locks/{self.address}")
                self._remote_lock.wait(on_wait=lambda text: self._on_message(f"{self.name}: {text}"))
            if not self._look_up(quarantine=True):
                self._quarantine_without_manifest()
                shutil.rmtree(self.path, ignore_errors=True)
                self.path.mkdir(parents=True)
        except BaseException as error:
            self._unlock()
            wrapped = self.store.wrap_os_error(error)
            if wrapped is error:
                raise
            raise wrapped from error
        if self.existing is not None:
            self._unlock()
        self._start_time = time.monotonic()
        return self

    def _look_up(self, *, quarantine: bool = False) -> bool:
        """Return whether the artifact exists and is intact. `quarantine` moves a damaged one (under the lock)."""
        try:
            artifact = self.store.find(self.address)
            if artifact is None:
                return False
            if self.store.remote is None or self.store.has_local(self.address):
                artifact.check()
            if self.store.remote is not None:
                self.store.push_if_missing(artifact)
        except CorruptArtifactError as error:
            if quarantine:
                target = self.store.quarantine(self.address)
                self._on_message(f"{error.what}; moved to {target}")
                return self.store.remote is not None and self._look_up()  # the remote copy may be intact
            return False
        artifact.name = self.name  # the manifest may have that of another recipe with the same content
        self.existing = self.artifact = artifact
        self.store.set_name(self.name, artifact)
        return True

    def _quarantine_without_manifest(self) -> None:
        """Move the folder of half a copy away, which would prevent the new artifact from being published."""
        folder = self.store.root / "artifacts" / self.address
        if folder.exists() and not (folder / FILE_NAME).exists():
            target = self.store.quarantine(self.address)
            self._on_message(f"{folder} has no {FILE_NAME}; moved to {target}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.existing is not None:
            return
        try:
            if error is not None:
                raise error
            self.artifact = self._publish()
        except BaseException as problem:
            shutil.rmtree(self.path, ignore_errors=True)
            wrapped = self.store.wrap_os_error(problem)
            if wrapped is not error:
                raise wrapped from problem
        finally:
            self._unlock()

    def _publish(self) -> Artifact:
        files = {}
        times = {}
        for name, status in sorted(relative_files(self.path).items()):
            path = self.path / name
            fsync_path(path)
            files[name] = {"sha256": file_sha256(path), "size": status.st_size}
            times[name] = status.st_mtime_ns
        if not files:
            raise StoreError(f"the step of {self.name} wrote no file", do="report this bug")
        manifest = Manifest(
            self.address,
            self.kind,
            self.name,
            self.step,
            self.version,
            self.config,
            self.parents,
            self.summary,
            time.time(),
            time.monotonic() - self._start_time,
            files,
        )
        (self.path / FILE_NAME).write_text(manifest.to_json())
        fsync_path(self.path / FILE_NAME)
        fsync_path(self.path)
        if self.store.remote is not None:
            self.store.remote.push(manifest, self.path)
        final = self.store.root / "artifacts" / self.address
        self.path.rename(final)
        fsync_path(final.parent)
        artifact = self.store.local_artifact(manifest)
        artifact.record_mtimes(times)
        self.store.set_name(self.name, artifact)
        shutil.rmtree(self.store.root / "scratch" / self.address, ignore_errors=True)
        return artifact

    def _unlock(self) -> None:
        if self._remote_lock is not None:
            self._remote_lock.release()
            self._remote_lock = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None
