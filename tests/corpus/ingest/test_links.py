"""Lists of scored links: which documents pass, and that the content of a list is part of addresses and units."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.corpus import IngestConfig, fingerprint, ingest
from whorl.corpus.links import GoodLinks, address_key
from whorl.errors import DataError
from whorl.tracking.progress import Progress


def write(path: Path, *records: object) -> str:
    data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def run(folder: Path, config: IngestConfig, name: str, **options: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the texts and the summary."""
    summary = ingest(config, folder / name, Progress.silent(), **options)
    return [
        t for f in sorted((folder / name).glob("doc*")) for t in pq.read_table(f)["text"].to_pylist()
    ], summary


@pytest.fixture
def pages(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    pages = [{"text": name, "url": f"https://example.org/{name}"} for name in "abcd"]
    return write(tmp_path / "data" / "pages.jsonl", *pages, {"text": "no address"})


def links(**scores: float | None) -> list[dict[str, Any]]:
    return [{"url": f"http://EXAMPLE.org/{name}/#x", "score": score} for name, score in scores.items()]


def test_documents_need_a_link_of_the_score(tmp_path: Path, pages: str) -> None:
    one = write(
        tmp_path / "one.jsonl", *links(a=3, b=2, c=None), *links(a=1), {"url": "https://example.org/d"}
    )
    two = write(tmp_path / "two.jsonl.gz", *links(b=2.5))
    config = IngestConfig(sources=[pages], links=[one, two])
    texts, summary = run(tmp_path, config, "out")
    assert texts == ["a"] and summary["quarantine"]["low_link_score"]["documents"] == 4
    lines = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert lines[0]["detail"] == "no link to https://example.org/b has a score of 3 or more"
    assert lines[-1]["detail"] == "it has no url"
    globbed = config.model_copy(update={"links": [str(tmp_path / "*.json*")], "min_link_score": 2.5})
    assert run(tmp_path, globbed, "lower")[0] == ["a", "b"]


def test_content_of_a_list_is_in_address_and_units(tmp_path: Path, pages: str) -> None:
    path = tmp_path / "links.jsonl"
    config = IngestConfig(sources=[pages], links=[write(path, *links(a=5))])
    without = config.model_copy(update={"links": []})
    first, units = fingerprint(config), tmp_path / "units"
    assert first != fingerprint(without)
    assert run(tmp_path, without, "all", units=units)[0] == ["a", "b", "c", "d", "no address"]
    assert run(tmp_path, config, "first", units=units)[0] == ["a"]
    write(path, *links(b=5))
    assert fingerprint(config) != first
    assert run(tmp_path, config, "second", units=units)[0] == ["b"]
    moved = config.model_copy(update={"links": [str(path.rename(tmp_path / "moved.jsonl"))]})
    n_units = len(list(units.iterdir()))
    assert run(tmp_path, moved, "third", units=units)[0] == ["b"] and len(list(units.iterdir())) == n_units
    with pytest.raises(DataError, match="changed while"):
        run(tmp_path, moved.model_copy(update={"fingerprint": first}), "fourth")


@pytest.mark.parametrize(
    "record",
    [{"score": 3}, {"url": "x", "score": "3"}, {"url": "x", "score": True}, {"url": 7, "score": 1}, [1]],
)
def test_bad_list_is_an_error_with_its_record(tmp_path: Path, record: object) -> None:
    path = write(tmp_path / "links.jsonl", {"url": "a", "score": 1}, record)
    with pytest.raises(DataError, match="record 2: "):
        GoodLinks([path], 3)


def test_missing_list_and_low_scores_are_errors(tmp_path: Path, pages: str) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        fingerprint(IngestConfig(sources=[pages], links=[str(tmp_path / "none.jsonl")]))
    low = write(tmp_path / "links.jsonl", *links(a=1))
    with pytest.raises(DataError, match="low_link_score 5"):
        run(tmp_path, IngestConfig(sources=[pages], links=[low]), "out")


@given(st.text("aB.-", min_size=1), st.text("aB/?=&%é", max_size=9), st.text("x#/", max_size=3))
def test_scheme_host_case_fragment_and_slash_do_not_count(host: str, path: str, fragment: str) -> None:
    key = address_key(f"https://{host}/{path}")
    assert key == address_key(f"http://{host.upper()}/{path}/#{fragment}") == address_key(f"{host}/{path}")
    assert address_key(f"https://{host}/{path}z") != key
