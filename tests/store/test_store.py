"""The local store: addresses, atomic builds, lookup, damage, lineage and garbage collection."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.store.step_examples import child, make, note

from whorl.errors import CorruptArtifactError, StoreError
from whorl.store import Store
from whorl.store.address import address_of, canonical_json
from whorl.store.lock import FileLock

json_numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_leaves = st.none() | st.booleans() | json_numbers | st.text()
json_values = st.recursive(
    json_leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_canonical_json_round_trip_and_key_order(value: dict[str, Any]) -> None:
    data = canonical_json(value)
    assert canonical_json(json.loads(data)) == data
    assert canonical_json(dict(reversed(value.items()))) == data


def test_address_covers_every_input_and_is_stable() -> None:
    inputs: dict[str, Any] = {"kind": "note", "parents": {"from": "ab"}, "config": {"x": 1}, "version": 1}
    changes = [{"kind": "text"}, {"parents": {"from": "ac"}}, {"parents": {"of": "ab"}}]
    changes += [{"config": {"x": 2}}, {"version": 2}, {"step": "other"}]
    addresses = [address_of(**inputs | change) for change in [{}, *changes]]
    assert len(set(addresses)) == 7
    assert addresses[0] == "7040198f66ac339e33da4815e6103ce4"


def test_address_rejects_nan() -> None:
    with pytest.raises(StoreError, match="JSON"):
        address_of("note", {}, {"x": float("nan")}, 1)


def test_build_finds_existing_artifact(store: Store) -> None:
    first = make(store)
    assert first.file("note.txt").read_text() == "hello"
    assert first.summary == {"letters": 5} and set(first.files) == {"note.txt", "deep/part.bin"}
    with note(store, "b/other") as build:
        assert build.existing is not None
    assert build.artifact is not None and build.artifact.address == first.address
    assert store.names() == {"a/one": first.address, "b/other": first.address}
    for ref in ("a/one", "one", first.address, first.address[:6]):
        assert store.open(ref).address == first.address
    assert [artifact.address for artifact in store.artifacts()] == [first.address]


def test_open_rejects_unknown_and_ambiguous_refs(store: Store) -> None:
    with pytest.raises(StoreError, match="is empty"):
        store.open("model")
    make(store, "a/one", "1")
    make(store, "b/one", "2")
    for ref, message in (("a/onne", "did you mean 'a/one'"), ("one", "several")):
        with pytest.raises(StoreError, match=message):
            store.open(ref)
    with pytest.raises(StoreError, match=r"no file 'nota\.txt'"):
        store.open("a/one").file("nota.txt")
    with pytest.raises(StoreError, match="invalid artifact name"):
        make(store, "../outside")


def test_build_exception_publishes_nothing_keeps_scratch(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), note(store) as build:
        (build.path / "half").write_text("half")
        (build.scratch / "checkpoint").write_text("7")
        raise ZeroDivisionError
    assert store.artifacts() == [] and store.names() == {}
    assert not build.path.exists()
    with note(store) as build:
        assert build.resumed and (build.scratch / "checkpoint").read_text() == "7"
        assert list(build.path.iterdir()) == []
        (build.path / "whole").write_text("whole")
    assert not (store.root / "scratch" / build.address).exists()


KILLED = """
    import os, signal, sys
    from tests.support.store.step_examples import note
    from whorl.store import Store
    with note(Store(sys.argv[1])) as build:
        (build.path / "half").write_text("half")
        (build.scratch / "checkpoint").write_text("7")
        if sys.argv[2] == "fork":
            if os.fork() == 0:
                import time; time.sleep(30)
                os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["no_child", "fork"])
def test_build_after_sigkill_resumes_from_scratch(store: Store, how: str) -> None:
    """The lock is released (even while a forked child runs), scratch survives, staging is emptied."""
    process = child(KILLED, store.root, how)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert store.artifacts() == []
    start = time.monotonic()
    with note(store) as build:
        assert time.monotonic() - start < 5
        assert (build.scratch / "checkpoint").read_text() == "7"
        assert list(build.path.iterdir()) == []
        (build.path / "whole").write_text("whole")
    assert build.artifact is not None and set(build.artifact.files) == {"whole"}


BUILDER = """
    import sys, time
    from tests.support.store.step_examples import note
    from whorl.store import Store
    with note(Store(sys.argv[1]), on_message=lambda text: print("message:", text, flush=True)) as build:
        if build.existing is None:
            print("building", flush=True)
            time.sleep(1.0)
            (build.path / "out").write_text("x")
        else:
            print("found", flush=True)
"""


def test_build_second_process_waits_and_finds(tmp_path: Path) -> None:
    outputs = [process.communicate(timeout=60)[0] for process in [child(BUILDER, tmp_path) for _ in range(2)]]
    words = " ".join(outputs).split()
    assert words.count("building") == 1 and words.count("found") == 1, outputs


def test_file_lock_wait_reports_owner(tmp_path: Path) -> None:
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert lock.acquire() and not other.acquire()
    messages: list[str] = []
    waiter = threading.Thread(target=other.wait, kwargs={"on_wait": messages.append})
    waiter.start()
    time.sleep(0.3)
    lock.release()
    waiter.join(timeout=10)
    assert not waiter.is_alive()
    assert messages == [f"waiting for process {os.getpid()} on {os.uname().nodename}"]
    other.release()


@pytest.mark.parametrize("text", ["jello", "hello, longer", None])
def test_damaged_file_is_reported_and_rebuilt(store: Store, text: str | None) -> None:
    path = make(store).file("note.txt")
    time.sleep(0.01)
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CorruptArtifactError, match=str(path)):
        store.open("a/one").file("note.txt")
    assert len(store.verify()) == 1 and "note.txt" in store.verify()[0]
    messages: list[str] = []
    with note(store, on_message=messages.append) as build:
        assert build.existing is None
        (build.path / "note.txt").write_text("hello")
    assert "note.txt" in messages[0] and "moved to" in messages[0]
    assert store.open("a/one").file("note.txt").read_text() == "hello"
    assert store.verify() == []


def test_verify_detects_damage_with_same_size_and_time(store: Store) -> None:
    path = make(store).file("note.txt")
    status = path.stat()
    path.write_text("jello")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.open("a/one").file("note.txt") == path  # same size, same time
    assert [str(path) in problem for problem in store.verify("a/one")] == [True]


def test_verify_reports_bad_manifest_stray_file_and_name(store: Store) -> None:
    one, two, three = (make(store, f"a/{name}", name) for name in ("one", "two", "three"))
    manifest = one.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"letters": 3', '"letters": 9'))
    (two.path / "stray").write_text("?")
    shutil.rmtree(three.path)
    problems = "\n".join(store.verify())
    assert "manifest" in problems and "stray" in problems and "a/three points to" in problems
    with pytest.raises(CorruptArtifactError, match="manifest"):
        store.open("a/one")
    assert make(store, "a/one", "one").summary == {"letters": 3}  # rebuilt


def test_copied_store_opens(store: Store, tmp_path: Path) -> None:
    make(store)
    for folder in ("artifacts", "names"):
        shutil.copytree(store.root / folder, tmp_path / "copy" / folder, copy_function=shutil.copy)
    assert Store(tmp_path / "copy").open("a/one").file("note.txt").read_text() == "hello"


def test_lineage_nests_parents_and_marks_missing(store: Store) -> None:
    root = make(store, "a/root", "root")
    middle = make(store, "a/middle", "middle", {"from": root})
    leaf = make(store, "a/leaf", "leaf", {"left": middle, "right": root})
    tree = store.lineage(leaf)
    assert tree["parents"]["left"]["parents"]["from"]["name"] == "a/root"
    assert tree["parents"]["right"]["address"] == root.address
    json.dumps(tree)
    shutil.rmtree(root.path)
    assert store.lineage(leaf)["parents"]["right"]["missing"] is True
    assert any("is missing" in problem for problem in store.verify("a/leaf"))


def test_gc_removes_only_unreachable_and_defaults_to_dry(store: Store) -> None:
    root = make(store, "a/root", "root")
    leaf = make(store, "a/leaf", "leaf", {"from": root})
    make(store, "a/old", "old")
    make(store, "a/old", "new")
    (store.root / "names" / "a" / "root").unlink()  # root is still reachable through leaf
    (store.root / "staging" / "0123").mkdir()
    for name, days in (("used", 6), ("unused", 8)):
        (store.root / "units" / name).mkdir(parents=True)
        os.utime(store.root / "units" / name, (time.time() - 86400 * days,) * 2)
    assert [item.label for item in store.gc() if item.label.startswith("units")] == ["units of unused"]
    (store.root / "units" / "unused").rmdir()
    assert store.gc() == [item for item in store.gc() if "staging" in item.label]  # everything else is recent
    found = store.gc(recent_seconds=0)
    assert sorted(item.label.split()[0] for item in found) == ["a/old", "staging"]
    assert len(store.artifacts()) == 4
    assert store.gc(dry_run=False, recent_seconds=0) == found
    assert {artifact.config["text"] for artifact in store.artifacts()} == {"root", "leaf", "new"}
    assert store.verify() == [] and store.gc(recent_seconds=0) == [] and leaf.path.exists()


def test_gc_keeps_parents_of_running_build(store: Store) -> None:
    parent = make(store, "a/parent", "1")
    (store.root / "names" / "a" / "parent").unlink()
    with note(store, "a/n", parents={"from": parent}) as build:
        assert store.gc(dry_run=False, recent_seconds=0) == []
        assert build.path.exists() and parent.path.exists()
        (build.path / "x").write_text("x")
