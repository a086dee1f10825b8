"""Stores on full, read-only and missing disks: published artifacts stay intact, and errors name the remedy."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.store.step_examples import make, note

from whorl.errors import DiskFullError, StoreError
from whorl.store import Store


class FullDisk(RuntimeError):
    """A library's error that wraps the system's message."""


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [NO_SPACE, FullDisk("write: No space left on device")])
def test_build_reports_full_disk_from_step(store: Store, error: Exception) -> None:
    first = make(store)
    with pytest.raises(DiskFullError, match="whorl gc"), note(store, text="new") as build:
        (build.path / "half").write_text("half")
        raise error
    assert [artifact.address for artifact in store.artifacts()] == [first.address]
    assert list((store.root / "staging").iterdir()) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 300 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs permission to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_build_on_full_tmpfs_keeps_store_intact(disk: Path) -> None:
    store = Store(disk)
    make(store)
    with pytest.raises(DiskFullError, match="is full"), note(store, text="new") as build:
        (build.path / "big").write_bytes(bytes(1_000_000))
    assert store.verify() == [] and len(store.artifacts()) == 1


def test_read_only_tmpfs_reads_and_rejects_builds(disk: Path) -> None:
    first = make(Store(disk))
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    store = Store(disk)
    assert make(store).address == first.address  # found, nothing written
    assert store.open("a/one").file("note.txt").read_text() == "hello" and store.verify() == []
    with pytest.raises(StoreError, match=r"(?s)cannot be written.*--store"):
        make(store, text="new")


@pytest.mark.parametrize(("number", "verb"), [(errno.EROFS, "written"), (errno.ENOENT, "created")])
def test_unwritable_location_names_the_store_option(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int, verb: str
) -> None:
    """ENOENT is the error of /proc."""

    def fail(self: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(StoreError, match=rf"(?s)cannot be {verb}.*--store"):
        make(store)


def test_store_rejects_plain_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be written"):
        make(Store(tmp_path / "file"))


def test_store_location_from_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_HOME", str(tmp_path / "home"))
    assert Store().root == tmp_path / "home"
    monkeypatch.delenv("WHORL_HOME")
    monkeypatch.chdir(tmp_path)
    assert Store().root == tmp_path / ".whorl"
