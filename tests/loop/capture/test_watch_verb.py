"""`whorl watch` with its index: a folder that changes, a table, a second process, wrong options."""

from __future__ import annotations

import signal
import time

import apsw
import pytest
from tests.support.cli import refuse, start_whorl, succeed

from whorl.log import default_log, open_log
from whorl.loop.search.reader import SearchReader
from whorl.search.documents import SearchQuery
from whorl.serve.api.sources import SourceSearch


def found(folder, words: str, name: str = "notes") -> list[str]:
    with SearchReader(folder / ".whorl", name) as reader:
        return [hit.title for hit in reader.search(SearchQuery(words)).hits]


def test_saved_note_is_found_and_a_deleted_one_is_not(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "first.md").write_text("A whorl is the flywheel of a spindle.")
    process = start_whorl("watch", "notes", "--to", "notes", cwd=tmp_path)
    try:
        assert process.stderr is not None
        while "1 changes, 0 rejected, 0 not yet indexed" not in (line := process.stderr.readline()):
            assert line, process.communicate()
        assert found(tmp_path, "flywheel") == ["first"]
        message = refuse(tmp_path, "watch", "notes", "--to", "notes")
        assert f"process {process.pid} captures notes" in message
        (notes / "second.txt").write_text("The distaff holds the flax.")
        (notes / "first.md").unlink()
        began = time.monotonic()
        while found(tmp_path, "distaff") != ["second"] or found(tmp_path, "flywheel"):
            assert time.monotonic() - began < 20
            time.sleep(0.02)
        sources = SourceSearch(SearchReader(tmp_path / ".whorl", "notes"), 1024)  # as a server has them
        assert [one["text"] for one in sources.find("What holds the flax?", 4)] == [
            "The distaff holds the flax."
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_table_is_indexed_and_its_settings_are_kept(tmp_path):
    write = apsw.Connection(
        str(tmp_path / "app.db")
    ).execute  # sqlite3 is another library: locks of one process
    write("PRAGMA journal_mode=WAL; CREATE TABLE docs(id INTEGER PRIMARY KEY, name, body, year)").fetchall()
    write("INSERT INTO docs VALUES (1, 'one', 'a spindle turns', 2001), (2, 'two', 'a loom', 2002)")
    words = ("watch", "app.db", "--to", "docs", "--table", "docs")
    assert "--text COLUMN" in refuse(tmp_path, *words, "--once")
    options = ("--text", "body", "--title", "name", "--once")
    assert "2 changes, 0 rejected, 0 not yet indexed" in succeed(tmp_path, *words, *options).output
    assert found(tmp_path, "spindle", "docs") == ["one"]
    write("DELETE FROM docs WHERE id = 1")
    succeed(tmp_path, *words, "--once")
    assert found(tmp_path, "spindle", "docs") == [] and found(tmp_path, "loom", "docs") == ["two"]
    assert "has text 'body', not 'name'" in refuse(tmp_path, *words, "--text", "name", "--once")


@pytest.mark.parametrize("words", [("nowhere",), (".", "--table", "docs"), (".", "--index", "redis://x")])
def test_wrong_sources_leave_no_index_and_no_topic(tmp_path, words):
    assert refuse(tmp_path, "watch", *words, "--to", "notes", "--once")
    assert not (tmp_path / ".whorl" / "search").exists()
    with open_log(default_log(tmp_path / ".whorl")) as log:
        assert "notes" not in log.topics()


def test_another_folder_is_refused(tmp_path):
    for name in ("notes", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.md").write_text(f"A spindle of {name}.")
    succeed(tmp_path, "watch", "notes", "--to", "notes", "--once")
    message = refuse(tmp_path, "watch", "others", "--to", "notes", "--once")
    assert "another place" in message and "give another --to" in message
    assert found(tmp_path, "spindle") == ["notes"]
