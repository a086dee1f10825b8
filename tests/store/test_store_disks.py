"""A store on disks that are full, read-only or not there: what was whole stays whole, and the message says what to do."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest
from tests.support.store.step_examples import make

from whorl.errors import DiskFullError, StoreError
from whorl.store import Store


class FullDisk(RuntimeError):
    """As libraries do it: an error of their own around the system's words."""


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), FullDisk("write: No space left on device")]
)
def test_disk_full_in_a_step(tmp_path: Path, error: Exception) -> None:
    store = Store(tmp_path)
    whole = make(store)
    with (
        pytest.raises(DiskFullError, match="whorl gc"),
        store.build(kind="note", name="n", parents={}, config={}, version=1) as build,
    ):
        (build.path / "half").write_text("half")
        raise error
    assert [artifact.address for artifact in store.artifacts()] == [whole.address]
    assert list((tmp_path / "staging").iterdir()) == []


def _mount(folder: Path, options: str) -> None:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    _mount(disk, "size=300k")
    try:
        store = Store(disk)
        make(store)
        with (
            pytest.raises(DiskFullError, match="is full"),
            store.build(kind="note", name="n", parents={}, config={}, version=1) as build,
        ):
            (build.path / "big").write_bytes(bytes(1_000_000))
        assert store.verify() == [] and len(store.artifacts()) == 1
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_really_read_only_store_reads_and_says_what_to_do(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    _mount(disk, "size=1m")
    try:
        first = make(Store(disk))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        store = Store(disk)
        assert make(store).address == first.address  # done: looked up, nothing written
        assert store.open("a/one").file("note.txt").read_text() == "hello" and store.verify() == []
        with pytest.raises(StoreError, match=r"(?s)cannot be written.*--store"):
            make(store, text="new")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_store_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match=r"(?s)cannot be written.*--store"):
        make(Store(tmp_path / "store"))


def test_a_store_on_a_plain_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be written"):
        make(Store(tmp_path / "file"))


def test_a_store_where_nothing_can_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))  # as /proc does

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match=r"(?s)cannot be created.*--store"):
        make(Store(tmp_path / "store"))


def test_the_location_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_HOME", str(tmp_path / "home"))
    assert Store().root == tmp_path / "home"
    monkeypatch.delenv("WHORL_HOME")
    monkeypatch.chdir(tmp_path)
    assert Store().root == tmp_path / ".whorl"
