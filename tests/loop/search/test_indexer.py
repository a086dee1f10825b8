"""The indexer: an index equals the last row of each key, whatever was lost on the way."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.support.search.memory_index import MemoryIndex

import whorl.loop.search.indexer as module
from whorl.errors import ConfigError
from whorl.log import open_log
from whorl.log.event import Event
from whorl.log.port import TopicConfig
from whorl.loop.capture.change import RowChange, Transaction
from whorl.loop.search.documents import content_of
from whorl.loop.search.indexer import Indexer, catch_up, rebuild_index
from whorl.loop.search.passages import cut
from whorl.loop.search.reader import SearchReader
from whorl.loop.search.settings import SearchSettings, fill_vectors, load_settings, save_settings
from whorl.search.documents import IndexBusyError, SearchQuery, content_digest


def transaction(number: int, *changes: tuple[str, str, dict | None]) -> list[Event]:
    rows = [RowChange(op, key, None, after, "notes") for op, key, after in changes]
    return Transaction(f"t{number}", {"lsn": number}, rows, 1e9 + number).events({"connector": "test"})


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index in memory that outlives its indexers."""
    kept = {}
    monkeypatch.setattr(module, "open_index", lambda url, **_: kept.setdefault(url, MemoryIndex()))
    save_settings(tmp_path, "notes", SearchSettings(topic="notes", log=f"sqlite:{tmp_path / 'log.db'}"))
    with open_log(f"sqlite:{tmp_path / 'log.db'}") as log:
        log.create("notes", TopicConfig(partitions=1))
        yield log, kept


def only(kept) -> MemoryIndex:
    return next(iter(kept.values()))


def test_index_equals_the_last_rows(index, tmp_path):
    log, kept = index
    draw, rows = random.Random(0), {}
    for number in range(60):
        key, text = f"k{draw.randrange(12)}", f"text {number}"
        if draw.random() < 0.3:
            log.append("notes", *transaction(number, ("d", key, None)))
            rows.pop(key, None)
        else:
            rows[key] = {"title": key, "text": text, "size": number, "tags": ["a", "b"]}
            log.append("notes", *transaction(number, ("u", key, rows[key])))
        if number % 20 == 19:
            with Indexer(tmp_path, "notes") as indexer:
                indexer.catch_up()
                assert indexer.lag() == 0
    expected = {(key, content_digest(*content_of(row, "text"))) for key, row in rows.items()}
    assert {(id, digest) for id, _, digest in only(kept).documents()} == expected
    assert only(kept).position() == {"notes/0": 60}


def test_an_absent_column_keeps_its_value(index, tmp_path):
    log, kept = index
    log.append("notes", *transaction(0, ("c", "k", {"title": "T", "text": "long text", "n": 1})))
    log.append("notes", *transaction(1, ("u", "k", {"title": "T", "n": 2})))
    with Indexer(tmp_path, "notes") as indexer:
        indexer.catch_up()
    hit = only(kept).search(SearchQuery("long")).hits[0]
    assert (hit.text, hit.fields["n"], hit.version) == ("long text", 2, 1)


def test_write_that_was_lost_is_repeated(index, tmp_path):
    log, kept = index
    log.append("notes", *transaction(0, ("c", "k", {"text": "first"})))
    with Indexer(tmp_path, "notes") as indexer:
        indexer.catch_up()
        only(kept).write = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        log.append("notes", *transaction(1, ("u", "k", {"text": "second"})))
        with pytest.raises(KeyboardInterrupt):
            indexer.catch_up()
    del only(kept).write
    assert only(kept).search(SearchQuery("second")).total == 0
    with Indexer(tmp_path, "notes") as indexer:
        indexer.catch_up()
    assert only(kept).search(SearchQuery("second")).total == 1


def test_joined_fields_come_before_or_after_their_document(index, tmp_path):
    log, kept = index
    log.create("votes", TopicConfig(partitions=3))
    save_settings(
        tmp_path, "notes", load_settings(tmp_path, "notes").model_copy(update={"joins": ("votes",)})
    )
    log.append("votes", Event("voted", "early", {"likes": 3}))
    log.append("notes", *transaction(0, ("c", "early", {"text": "one"}), ("c", "late", {"text": "two"})))
    with Indexer(tmp_path, "notes") as indexer:
        indexer.catch_up()
        before = only(kept).versions(["late"])["late"]
        log.append("votes", Event("voted", "late", {"likes": 5}))
        indexer.catch_up()
    assert [h.fields["likes"] for q in ("one", "two") for h in only(kept).search(SearchQuery(q)).hits] == [
        3,
        5,
    ]
    assert only(kept).versions(["late"])["late"] > before


def test_second_writer_and_unknown_index_are_refused(index, tmp_path):
    with Indexer(tmp_path, "notes"), pytest.raises(IndexBusyError):
        Indexer(tmp_path, "notes")
    with pytest.raises(ConfigError, match=r"(?s)no search index 'nots'.*did you mean 'notes'"):
        Indexer(tmp_path, "nots")


def notes(number: int, first: int = 0) -> list[Event]:
    changes = [("c", f"k{n}", {"text": f"note {n}", "title": str(n)}) for n in range(first, first + number)]
    return transaction(first, *changes)


@pytest.fixture
def stored(tmp_path):
    """A log of 230 notes, whose index is in a folder."""
    save_settings(tmp_path, "notes", SearchSettings(topic="notes", log=f"sqlite:{tmp_path / 'log.db'}"))
    with open_log(f"sqlite:{tmp_path / 'log.db'}") as log:
        log.create("notes", TopicConfig(partitions=1))
        log.append("notes", *notes(230))
        yield log


def test_rebuild_ends_equal_under_writes(stored, tmp_path, monkeypatch):
    with Indexer(tmp_path, "notes") as live:
        assert live.catch_up()
        before, plain = set(live.store.index.documents()), Indexer.catch_up

        def rebuilt(fresh) -> bool:
            """The old index takes a record that the new one has not read."""
            done = plain(fresh)
            if stored.bounds("notes")[0].next < 233:
                stored.append("notes", *notes(1, stored.bounds("notes")[0].next))
                assert plain(live)
            return done

        with SearchReader(tmp_path, "notes") as reader:
            monkeypatch.setattr(Indexer, "catch_up", rebuilt)
            rebuild_index(tmp_path, "notes")
            monkeypatch.undo()
            assert reader.search(SearchQuery('"note 232"')).total == 1
            assert before < set(reader.index().documents()) == set(live.store.index.documents())
        stored.append("notes", *notes(1, 233))
        assert not live.catch_up()  # it ends, since the settings name another generation
    catch_up(tmp_path, "notes")
    with SearchReader(tmp_path, "notes") as reader:
        assert reader.lag() == 0 and len(list(reader.index().documents())) == 234
    rebuild_index(tmp_path, "notes")
    assert sorted(p.name for p in (tmp_path / "search" / "notes").iterdir()) == ["1", "2", "settings.json"]


def one_hot(size: int, calls: list):
    """An encoder whose vectors have one 1, by the number in the text."""

    def encode(texts):
        calls.extend(texts)
        places = [int(text.split()[-1]) % size for text in texts]
        return np.eye(size, dtype=np.float32)[places]

    return encode


def test_second_encoder_is_filled_then_switched_in_one_step(stored, tmp_path):
    calls = {"three": [], "five": []}
    encoders = {"three": one_hot(3, calls["three"]), "five": one_hot(5, calls["five"])}
    fill_vectors(tmp_path, "notes", "three")
    catch_up(tmp_path, "notes", encoders.get)
    near = SearchQuery("of 7", mode="vectors", k=3)
    with SearchReader(tmp_path, "notes", encoders.get) as reader:
        assert {int(hit.title) % 3 for hit in reader.search(near).hits} == {1}
        fill_vectors(tmp_path, "notes", "five")
        with Indexer(tmp_path, "notes", encoders.get) as indexer:
            for point in indexer.steps():  # until it is killed within the fill
                assert {int(hit.title) % 3 for hit in reader.search(near).hits} == {1}
                if point == "filled":
                    break
        stored.append("notes", *notes(2, 230))
        catch_up(tmp_path, "notes", encoders.get)
        assert {int(hit.title) % 5 for hit in reader.search(near).hits} == {2}
    assert load_settings(tmp_path, "notes").encoder == "five"
    texts = [text for text in calls["five"] if text != "of 7"]
    assert len(texts) == len(set(texts)) == 232, "each text is embedded once"


@pytest.mark.parametrize("text", ["", "short", "word " * 300, "x" * 999, "a. b\n\nc\n" * 50, "é\n" * 400])
def test_passages_join_to_their_text(text):
    parts = cut(text, 100)
    assert "".join(part for _, part in parts) == text
    assert all(text[start:].startswith(part) and len(part) <= 100 for start, part in parts)
