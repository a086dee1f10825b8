"""The store: artifacts, found by address or by name.

    artifacts/ADDRESS/   manifest.json and the files; immutable once published
    names/NAME           the address that the name currently points to
    staging/, scratch/   builds in progress, and their files that survive a crash
    units/               finished parts of corpus steps, which later runs reuse
    locks/, verified/    the owner of each build; modification times at the last hash of each file
    quarantine/          damaged artifacts
    runs/NAME-MARK/      records of runs: `gc` keeps the artifacts in their `steps.json`

A store under a URL uses the same folder as a local cache; the remote side is authoritative (see `remote`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whorl.errors import CorruptArtifactError, StoreError, one_of
from whorl.files import write_atomic
from whorl.store.address import ADDRESS_DIGITS, address_of, read_address, user_path, validate_name
from whorl.store.artifact import Artifact
from whorl.store.files import wrap_os_error
from whorl.store.lock import FileLock, is_locked
from whorl.store.manifest import FILE_NAME, Manifest
from whorl.store.remote import Remote

FOLDERS = ("artifacts", "names", "staging", "scratch", "units", "locks", "verified", "quarantine")
KEPT_SECONDS = {"staging": 0.0, "scratch": 7 * 86400.0, "units": 7 * 86400.0, "quarantine": 0.0}
RECENT_SECONDS = 3600.0


@dataclass(frozen=True)
class Garbage:
    """Something that `gc` removes or would remove: an artifact, or a leftover of a build."""

    path: Path
    label: str
    size: int  # bytes


class Store:
    """A store of artifacts under addresses that are hashes of their inputs.

    Args:
        location: a folder or an fsspec URL; default `$WHORL_HOME`, then `.whorl` in the current folder.
        cache: local folder of a store under a URL; default `$XDG_CACHE_HOME/whorl/stores/HASH`.
    """

    def __init__(self, location: str | Path | None = None, *, cache: Path | None = None) -> None:
        location = str(location or os.environ.get("WHORL_HOME") or ".whorl")
        self.remote: Remote | None = None
        if "://" in location and not location.startswith("file://"):
            self.remote = Remote(location)
            if cache is None:
                home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
                cache = home / "whorl" / "stores" / hashlib.sha256(location.encode()).hexdigest()[:16]
            self.root = cache.absolute()
        else:
            self.root = Path(location.removeprefix("file://")).expanduser().absolute()
        self.location = location

    # Build

    def address(
        self,
        kind: str,
        parents: Mapping[str, str],
        config: Mapping[str, Any],
        version: int,
        step: str = "",
    ) -> str:
        """Return the address of an artifact with these inputs (parents: role -> address)."""
        return address_of(kind, parents, config, version, step)

    def set_name(self, name: str, artifact: Artifact) -> None:
        """Point `name` to `artifact`."""
        if self._read_name(validate_name(name)) == artifact.address:
            return
        if self.remote is not None:
            self.remote.write(f"names/{name}", artifact.address.encode())
            return
        path = self.root / "names" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, artifact.address, staging=self.root / "staging")
        except OSError as error:
            raise self.wrap_os_error(error) from error

    def remove_name(self, name: str) -> None:
        """Remove a name; its artifact stays until `gc`."""
        if self.remote is not None:
            self.remote.remove(f"names/{name}")
        else:
            self.delete(self.root / "names" / name)

    def make_folders(self) -> None:
        """Create the store's folders. Raises StoreError if that fails."""
        try:
            for folder in FOLDERS:
                (self.root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            wrapped = self.wrap_os_error(error)
            if wrapped is error:  # a path that cannot hold folders, such as /proc
                wrapped = StoreError(
                    f"the store {self.root} cannot be created: {error}",
                    do="use a writable folder: --store FOLDER, or WHORL_HOME=FOLDER",
                )
            raise wrapped from error

    def wrap_os_error(self, error: BaseException) -> BaseException:
        """Return a DiskFullError or StoreError for a full or read-only disk; return any other error unchanged."""
        return wrap_os_error(error, self.root)

    # Find

    def find(self, address: str) -> Artifact | None:
        """Return the artifact at a full address, or None. Raises CorruptArtifactError for a damaged manifest."""
        path = self.root / "artifacts" / address / FILE_NAME
        if path.exists():
            return self.local_artifact(Manifest.parse(path.read_bytes(), str(path)))
        manifest = self.remote.manifest(address) if self.remote is not None else None
        return None if manifest is None else self.local_artifact(manifest)

    def open(self, ref: str) -> Artifact:
        """Return the artifact for a name, the unique last part of a name, an address, or a unique address prefix.

        Raises:
            StoreError: no artifact matches, or more than one.
        """
        names = self.names()
        address = names.get(ref)
        if address is None:
            own = {name: target for name, target in names.items() if not name.startswith("served")}
            ends = {target for name, target in own.items() if name.rsplit("/", 1)[-1] == ref}
            starts = {full for full in self._addresses() if len(ref) >= 4 and full.startswith(ref)}
            candidates = sorted(ends or starts)
            if len(candidates) > 1:
                labels = [match.label for match in map(self.find, candidates) if match is not None]
                raise StoreError(f"{ref!r} matches several artifacts", expected=one_of(ref, labels))
            address = candidates[0] if candidates else None
        artifact = self.find(address) if address is not None else None
        if artifact is None:
            expected = one_of(ref, sorted(names)) if names else "an artifact, but this store is empty"
            raise StoreError(
                f"the store {self.location} has no artifact {ref!r}",
                expected=expected,
                do=f"`whorl import {ref}` makes an artifact of a folder with a model"
                if user_path(ref).is_dir()
                else "`whorl ls` lists all artifacts; `whorl run quickstart` creates some",
            )
        return artifact

    def names(self) -> dict[str, str]:
        """Return every name with its address."""
        if self.remote is not None:
            named = {name: self.remote.read(f"names/{name}") for name in self.remote.names("names")}
            return {name: target.decode() for name, target in named.items() if target is not None}
        folder = self.root / "names"
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        local = {path.relative_to(folder).as_posix(): read_address(path) for path in paths}
        return {name: address for name, address in local.items() if address is not None}

    def damaged_names(self) -> list[str]:
        """Return the local names whose file has no address, as a power cut leaves them."""
        folder = self.root / "names"
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return [path.relative_to(folder).as_posix() for path in paths if read_address(path) is None]

    def require(self) -> Store:
        """Return this store. Raises StoreError if it has no folder yet."""
        if self.remote is None and not self.root.is_dir():
            raise StoreError(
                f"there is no store {self.root}",
                do="give another one with --store or WHORL_HOME; `whorl run quickstart` creates one",
            )
        return self

    def artifacts(self) -> list[Artifact]:
        """Return every artifact with a readable manifest, oldest first."""
        artifacts = []
        for address in self._addresses():
            try:
                artifact = self.find(address)
            except CorruptArtifactError:
                continue  # `verify` reports it
            if artifact is not None:
                artifacts.append(artifact)
        return sorted(artifacts, key=lambda artifact: (artifact.created, artifact.address))

    def lineage(self, artifact: Artifact) -> dict[str, Any]:
        """Return an artifact's ancestry as nested dictionaries, with parents by role."""
        parents: dict[str, Any] = {}
        for role, address in artifact.parents.items():
            parent = self.find(address)
            missing = {"address": address, "missing": True, "parents": {}}
            parents[role] = self.lineage(parent) if parent is not None else missing
        return {
            "address": artifact.address,
            "kind": artifact.kind,
            "name": artifact.name,
            "step": artifact.step,
            "version": artifact.version,
            "config": artifact.config,
            "created": artifact.created,
            "seconds": artifact.seconds,
            "bytes": artifact.manifest.size,
            "parents": parents,
        }

    # Maintain

    def verify(
        self, ref: str | None = None, *, on_artifact: Callable[[Artifact], None] | None = None
    ) -> list[str]:
        """Hash every file of an artifact and its ancestors, or of the whole store.

        Returns one sentence per problem; an empty list means no damage. For a store under a URL the local copies are
        checked, and missing ones are downloaded.
        """
        problems = [
            f"the name {name} is damaged: run its recipe again, or remove {self.root / 'names' / name}"
            for name in self.damaged_names()
        ]
        if ref is not None:
            addresses = sorted(self._reachable({self.open(ref).address}, problems))
        else:
            addresses = self._addresses()
            dangling = (name for name, target in self.names().items() if target not in set(addresses))
            problems += [f"the name {name} points to a missing artifact" for name in dangling]
        for address in addresses:
            try:
                artifact = self.find(address)
            except CorruptArtifactError as error:
                problems.append(error.what)
                continue
            if artifact is None:
                problems.append(f"artifact {address}, the parent of another, is missing")
                continue
            if on_artifact is not None:
                on_artifact(artifact)
            problems += artifact.find_damage()
        return problems

    def gc(self, *, dry_run: bool = True, recent_seconds: float = RECENT_SECONDS) -> list[Garbage]:
        """Remove unreachable artifacts, old scratch and units, staging folders of dead builds, and damaged artifacts.

        An artifact is reachable from a name, from a run, or from a build in progress. Artifacts of the last
        `recent_seconds` are kept, since a run may be between two steps, and so are scratch folders and units that were
        used in the last week.

        Returns the removed items, or with `dry_run` the removable ones.

        Raises:
            StoreError: the record of a run cannot be read, so its artifacts are not known.
        """
        roots = {*self.names().values(), *self._addresses_of_runs()}
        for lock in (self.root / "locks").glob("*"):
            if is_locked(lock):
                roots |= {lock.name, *FileLock(lock).owner().get("parents", [])}
        reachable = self._reachable(roots, [])
        now = time.time()
        items = []
        for artifact in self.artifacts():
            if artifact.address not in reachable and now - artifact.created > recent_seconds:
                folder = self.root / "artifacts" / artifact.address
                items.append(Garbage(folder, artifact.label, artifact.manifest.size))
        for kind, age in KEPT_SECONDS.items():
            for folder in sorted((self.root / kind).glob("*")):
                if folder.name not in roots and now - folder.stat().st_mtime > age:
                    items.append(Garbage(folder, f"{kind} of {folder.name[:8]}", _disk_bytes(folder)))
        if not dry_run:
            for garbage in items:
                self.delete(garbage.path)
        return items

    def delete(self, folder: Path) -> None:
        """Remove a folder or file of the store: one rename hides it, then its files are deleted."""
        try:
            if folder.parent.name == "artifacts":
                if self.remote is not None:
                    self.remote.delete(folder.name)
                (self.root / "verified" / f"{folder.name}.json").unlink(missing_ok=True)
                if not folder.exists():
                    return
                folder = folder.rename(self.root / "quarantine" / f"deleted-{folder.name}-{time.time_ns()}")
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        except OSError as error:
            raise self.wrap_os_error(error) from error

    def quarantine(self, address: str) -> Path:
        """Move a damaged artifact into `quarantine/` and return its new path. The caller must hold its lock."""
        target = self.root / "quarantine" / f"{address}-{time.time_ns()}"
        folder = self.root / "artifacts" / address
        if folder.exists():
            folder.rename(target)
        (self.root / "verified" / f"{address}.json").unlink(missing_ok=True)
        return target

    def has_local(self, address: str) -> bool:
        return (self.root / "artifacts" / address / FILE_NAME).exists()

    def push_if_missing(self, artifact: Artifact) -> None:
        """For a store under a URL: upload an artifact that only the local cache has."""
        if self.remote is not None and self.remote.manifest(artifact.address) is None:
            self.remote.push(artifact.manifest, artifact.path)

    def local_artifact(self, manifest: Manifest) -> Artifact:
        """Return the artifact of a manifest."""
        return Artifact(manifest, self._fetch, self.root / "verified" / f"{manifest.address}.json")

    def _fetch(self, address: str) -> Path:
        folder = self.root / "artifacts" / address
        if self.remote is None or folder.exists():
            return folder
        try:
            self.make_folders()
            download = self.root / "staging" / f"pull-{address}-{os.getpid()}-{time.time_ns()}"
            download.mkdir()
            try:
                manifest = self.remote.pull(address, download)
                (download / FILE_NAME).write_text(manifest.to_json())
                if not folder.exists():
                    download.rename(folder)
            finally:
                shutil.rmtree(download, ignore_errors=True)
        except OSError as error:
            if not folder.exists():  # otherwise another process downloaded the same files first
                raise self.wrap_os_error(error) from error
        return folder

    def _read_name(self, name: str) -> str | None:
        if self.remote is not None:
            target = self.remote.read(f"names/{name}")
            return None if target is None else target.decode()
        path = self.root / "names" / name
        return read_address(path) if path.is_file() else None

    def _addresses(self) -> list[str]:
        if self.remote is not None:
            return self.remote.addresses()
        names = (path.parent.name for path in (self.root / "artifacts").glob(f"*/{FILE_NAME}"))
        return sorted(name for name in names if len(name) == ADDRESS_DIGITS)

    def _reachable(self, roots: set[str], problems: list[str]) -> set[str]:
        """Return the roots and all their ancestors."""
        reachable: set[str] = set()
        pending = list(roots)
        while pending:
            address = pending.pop()
            if address in reachable:
                continue
            reachable.add(address)
            try:
                artifact = self.find(address)
            except CorruptArtifactError as error:
                problems.append(error.what)
                continue
            if artifact is not None:
                pending += artifact.parents.values()
        return reachable

    def _addresses_of_runs(self) -> set[str]:
        found = set()
        for path in (self.root / "runs").glob("*/steps.json"):
            try:
                found |= {step.get("address", "") for step in json.loads(path.read_bytes()).values()}
            except FileNotFoundError:  # the run was removed just now
                continue
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise StoreError(
                    f"{path} cannot be read, so the artifacts of this run are not known: {error}",
                    do=f"restore the file, or remove the run: whorl runs --remove {path.parent.name}",
                ) from error
        return found


def _disk_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
