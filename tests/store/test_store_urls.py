"""Stores under a URL: lookup, download, repair from the remote copy, and heartbeat locks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.store.step_examples import make, note

from whorl.errors import CorruptArtifactError, StoreError
from whorl.store import Store
from whorl.store.lock import HeartbeatLock
from whorl.store.remote import Remote


@pytest.fixture
def url() -> Any:
    import fsspec

    fsspec.filesystem("memory").store.clear()
    return "memory://store"


def test_url_store_builds_finds_and_downloads(tmp_path: Path, url: str) -> None:
    here, there = Store(url, cache=tmp_path / "here"), Store(url, cache=tmp_path / "there")
    root = make(here, "a/root", "root")
    leaf = make(here, "a/leaf", "leaf", {"from": root})
    with note(there, "a/root", "root") as build:
        assert build.existing is not None
    assert not there.has_local(root.address)  # a lookup downloads no files
    assert there.open("leaf").file("note.txt").read_text() == "leaf"
    assert there.lineage(leaf)["parents"]["from"]["name"] == "a/root"
    assert there.verify() == [] and len(there.artifacts()) == 2


def test_url_store_restores_damaged_local_copy(tmp_path: Path, url: str) -> None:
    store = Store(url, cache=tmp_path)
    artifact = make(store)
    artifact.file("note.txt").write_text("damaged")
    with pytest.raises(CorruptArtifactError):
        artifact.file("note.txt")
    with note(store) as build:
        assert build.existing is not None
    assert store.open("a/one").file("note.txt").read_text() == "hello"


def test_url_store_publishes_atomically_and_runs_gc(tmp_path: Path, url: str) -> None:
    store = Store(url, cache=tmp_path)
    with pytest.raises(ZeroDivisionError), note(store):
        raise ZeroDivisionError
    assert store.artifacts() == []
    make(store, "a/one", "1")
    make(store, "a/one", "2")
    assert len(store.gc(dry_run=False, recent_seconds=0)) == 1
    assert [artifact.config["text"] for artifact in Store(url, cache=tmp_path / "new").artifacts()] == ["2"]


def test_url_store_rejects_unknown_protocol() -> None:
    with pytest.raises(StoreError, match="nosuch"):
        Store("nosuch://bucket/store")


def test_heartbeat_lock_excludes_until_owner_dies(url: str) -> None:
    remote = Remote(url)
    first = HeartbeatLock(remote, "locks/x", interval=0.05, timeout=0.6)
    first.wait()
    second = HeartbeatLock(remote, "locks/x", interval=0.05, timeout=0.6)
    waiter = threading.Thread(target=second.wait)
    waiter.start()
    waiter.join(timeout=1.0)
    assert waiter.is_alive()  # waits longer than `timeout` for a living owner
    first._stop.set()  # dies without releasing
    waiter.join(timeout=5)
    assert not waiter.is_alive()
    second.release()
    assert remote.read("locks/x") is None
