"""`whorl search`: what it prints, and what it refuses."""

from __future__ import annotations

import pytest
from tests.support.cli import refuse, succeed

from whorl.log import default_log, open_log
from whorl.log.port import TopicConfig
from whorl.loop.capture.change import RowChange, Transaction
from whorl.loop.search.settings import SearchSettings, save_settings

ROWS = {
    "a": {"title": "Dates", "text": "How to parse a date from text.", "year": 2001, "language": "en"},
    "b": {"title": "Zeit", "text": "Datum und Zeit lesen, a date.", "year": 2005, "language": "de"},
}


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / ".whorl"
    save_settings(folder, "notes", SearchSettings(topic="notes"))
    with open_log(default_log(folder)) as log:
        log.create("notes", TopicConfig(partitions=1))
        changes = [RowChange("c", key, None, row, "notes") for key, row in ROWS.items()]
        log.append("notes", *Transaction("t", {}, changes, 1e9).events({"connector": "test"}))
    return folder


def test_search_prints_hits_facets_and_parts(store, tmp_path):
    words = [
        "search",
        "parse date",
        "--in",
        "notes",
        "--explain",
        "--facet",
        "language",
        "--store",
        str(store),
    ]
    out = succeed(tmp_path, *words).stdout
    assert out.index(" 1  a Dates") < out.index(" 2  b Zeit")
    assert "2 documents" in out and "language: " in out and "pars " in out
    some = ["search", "date", "--in", "notes", "--store", str(store), "--filter"]
    assert "b Zeit" not in succeed(tmp_path, *some, "year=..2003").stdout
    assert "a Dates" not in succeed(tmp_path, *some, "language=de").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--filter", "year"], "expected: language=en"),
        (["--filter", "yaer=3"], "did you mean 'year'"),
        (["--facet", "langage"], "did you mean 'language'"),
    ],
)
def test_bad_options_are_named(store, tmp_path, words, message):
    assert message in refuse(tmp_path, "search", "date", "--in", "notes", "--store", str(store), *words)


def test_unknown_index_names_the_nearest(store, tmp_path):
    assert "did you mean 'notes'" in refuse(tmp_path, "search", "date", "--in", "note", "--store", str(store))
