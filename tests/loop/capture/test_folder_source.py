"""A folder as a source: contents, ids, renames, deletions, links in a circle, a folder that is gone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from whorl.corpus.documents import document_id
from whorl.log import open_log
from whorl.log.memory import MemoryLog
from whorl.log.port import Log
from whorl.loop.capture import folder as folder_source
from whorl.loop.capture.capture import Capture
from whorl.loop.capture.source import SourceOptions, open_source
from whorl.loop.events import QUARANTINE


def start(log: Log, folder: Path, warnings: list[str] | None = None) -> Capture:
    options = SourceOptions(
        str(folder), "", "notes", folder, lambda: (r.event() for r in log.replay("notes"))
    )
    return Capture(open_source(options), log, "notes", (warnings if warnings is not None else []).append)


def step(capture: Capture) -> str:
    """Read all that is there, as a new process does."""
    return next(point for point in capture.steps() if point in ("idle", "waiting"))


def rows(log: Log) -> set[tuple[str, str]]:
    """Fold the topic into path -> texts."""
    found: dict[str, Any] = {}
    for record in log.replay("notes"):
        if record.event().data["op"] == "d":
            del found[record.key]
        else:
            found[record.key] = record.event().data["after"]
    return {(row["path"], row["text"]) for row in found.values()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes" / "sub").mkdir(parents=True)
    return tmp_path / "notes"


def test_saved_files_are_rows_with_the_ids_of_the_corpus(folder):
    (folder / "a.md").write_text("# First\n")
    (folder / "sub" / "b.jsonl").write_text('{"text": "one", "title": "T"}\n{"text": "two"}\n')
    (folder / ".hidden").write_text("x")
    log = MemoryLog()
    step(start(log, folder))
    events = [record.event() for record in log.replay("notes")]
    assert events[0].data["after"] == {
        "title": "a", "text": "# First\n", "path": "a.md",
        "language": "markdown", "file": events[0].data["after"]["file"],
    }  # fmt: skip
    assert events[0].key == document_id(str(folder), "a.md", 0) and events[1].data["after"]["title"] == "T"
    assert rows(log) == {("a.md", "# First\n"), ("sub/b.jsonl", "one"), ("sub/b.jsonl", "two")}


def test_each_change_is_one_event_also_after_a_restart(folder):
    log = open_log(f"sqlite:{folder.parent / 'log.db'}")
    (folder / "a.md").write_text("a")
    (folder / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    capture = start(log, folder)
    for _ in range(2):
        step(capture)
    (folder / "a.md").write_text("b")
    (folder / "b.jsonl").write_text('{"text": "one"}\n{"text": "six"}\n{"text": "new"}\n')
    step(capture)
    (folder / "a.md").unlink()
    step(start(log, folder))
    step(start(log, folder))
    assert [r.event().data["op"] for r in log.replay("notes")] == ["c", "c", "c", "u", "u", "c", "d"]
    assert rows(log) == {("b.jsonl", text) for text in ("one", "six", "new")}
    log.close()


def test_rename_is_a_deletion_and_an_insertion_at_once(folder):
    log = MemoryLog()
    (folder / "a.md").write_text("text")
    step(capture := start(log, folder))
    (folder / "a.md").rename(folder / "sub" / "z.md")
    step(capture)
    _, deleted, inserted = (record.event().data for record in log.replay("notes"))
    assert (deleted["op"], inserted["op"]) == ("d", "c")
    assert deleted["transaction"]["id"] == inserted["transaction"]["id"]
    assert rows(log) == {("sub/z.md", "text")}


def test_links_in_a_circle_end(folder):
    (folder / "a.md").write_text("a")
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "x.md").symlink_to(folder / "y.md")
    (folder / "y.md").symlink_to(folder / "x.md")
    log, warnings = MemoryLog(), []
    step(start(log, folder, warnings))
    assert rows(log) == {("a.md", "a")}
    assert sorted(record.event().data["key"] for record in log.replay(QUARANTINE)) == ["x.md", "y.md"]


def test_folder_that_is_gone_is_waited_for_and_deletes_nothing(folder):
    log, warnings = MemoryLog(), []
    (folder / "a.md").write_text("a")
    capture = start(log, folder, warnings)
    step(capture)
    folder.rename(folder.parent / "away")
    assert step(capture) == "waiting" and "notes" in warnings[0]
    (folder.parent / "away").rename(folder)
    assert step(capture) == "idle" and rows(log) == {("a.md", "a")}
    (folder / "a.md").unlink()
    step(capture)
    assert rows(log) == set()


def test_file_that_changes_while_it_is_read_is_read_again(folder, monkeypatch):
    log, warnings = MemoryLog(), []
    (folder / "a.md").write_text("first")
    (folder / "b.md").write_text("gone")
    capture, read = start(log, folder, warnings), folder_source.read_file

    def read_file(file, config):
        yield from read(file, config)
        (folder / "a.md").write_text("second")
        (folder / "b.md").unlink(missing_ok=True)

    with monkeypatch.context() as patched:
        patched.setattr(folder_source, "read_file", read_file)
        step(capture)
    assert rows(log) == set()
    step(capture)
    assert rows(log) == {("a.md", "second")} and not warnings


def test_folder_that_is_slow_to_list_is_listed_less_often(folder, monkeypatch):
    monkeypatch.setattr(folder_source, "SLOW", 0.0)
    (folder / "a.md").write_text("first")
    log = MemoryLog()
    capture, began = start(log, folder), time.monotonic()
    step(capture)
    assert began < capture.source._pause_until < began + 4 * (time.monotonic() - began)
    capture.source._pause_until += 60.0
    (folder / "a.md").write_text("second")
    step(capture)
    assert rows(log) == {("a.md", "first")}
    capture.source._pause_until = 0.0
    step(capture)
    assert rows(log) == {("a.md", "second")}


def test_append_that_failed_is_repeated(folder, monkeypatch):
    log = MemoryLog()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(700)))
    (folder / "b.md").write_text("b")
    capture = start(log, folder)
    with monkeypatch.context() as patched:
        patched.setattr(log, "append", lambda *_: (_ for _ in ()).throw(log_away()))
        assert step(capture) == "waiting"
    step(capture)
    assert len(rows(log)) == 701 and log.bounds("notes")[0].next == 701


def log_away() -> Exception:
    from whorl.log.port import LogUnavailableError

    return LogUnavailableError("away")
