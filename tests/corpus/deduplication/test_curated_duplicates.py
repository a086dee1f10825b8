"""Which copies survive curation: order, earlier corpora, settings of MinHash; engines, and hashes of contents."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from whorl.corpus import CurateConfig, IngestConfig, curate, document_files, ingest
from whorl.corpus.deduplication.settings import SignatureConfig
from whorl.corpus.mapreduce.settings import ExecutorConfig
from whorl.corpus.provenance import hashes as content_hashes
from whorl.corpus.provenance.catalog import Catalog
from whorl.corpus.provenance.explain import explain
from whorl.corpus.provenance.hashes import ContentHashes
from whorl.errors import ConfigError
from whorl.tracking.progress import Progress

SPLITS = {"validation_bytes": 600, "test_bytes": 600}


WORDS = ["river", "stone", "light", "windows", "leaves", "cloud", "pathway"]


def prose(seed: int, n: int = 60) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + str(rng.random())[2:4] for _ in range(n))


def corpus(folder: Path, texts: dict[str, str], executor: Any = None, **options: Any) -> dict[str, str]:
    """Ingest and curate texts; return path -> reason."""
    data = folder.parent / f"{folder.parent.name}-data" if executor is not None else folder / "data"
    for path, text in texts.items():
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        (data / path).write_text(text)
    for name in ("ingest", "curate"):
        (folder / name).mkdir(parents=True)
    config = IngestConfig(sources=[str(data)], equal_files="all")
    ingest(config, folder / "ingest", Progress.silent(), executor=executor)
    files = document_files(folder / "ingest")
    curate(CurateConfig(**SPLITS, **options), files, folder / "curate", Progress.silent(), executor=executor)
    paths = [p for file in files for p in pq.read_table(file)["path"].to_pylist()]
    reasons = pq.read_table(folder / "curate" / "selection.parquet")["reason"].to_pylist()
    return dict(zip(paths, reasons, strict=True))


def others() -> dict[str, str]:
    return {f"x{i}.txt": prose(100 + i) for i in range(12)}


def test_first_in_the_order_survives_among_equal_texts(tmp_path: Path) -> None:
    same = prose(1)
    texts = {"a.txt": same, "b.txt": same, "c.txt": same, **others()}
    assert corpus(tmp_path / "default", texts)["a.txt"] == ""
    found = corpus(tmp_path / "order", texts, near_duplicate_order="path DESC")
    assert (found["a.txt"], found["b.txt"], found["c.txt"]) == ("exact_duplicate", "exact_duplicate", "")


def test_a_copy_survives_where_the_query_drops_the_first(tmp_path: Path) -> None:
    same = prose(2)
    query = (
        "SELECT row, CASE WHEN path = 'a.txt' THEN 'refused' WHEN exact_duplicate THEN 'exact_duplicate' ELSE '' END "
        "AS reason FROM attributes"
    )
    found = corpus(tmp_path, {"a.txt": same, "b.txt": same, "c.txt": same, **others()}, query=query)
    assert (found["a.txt"], found["b.txt"], found["c.txt"]) == ("refused", "", "exact_duplicate")


def test_documents_of_earlier_corpora_stay_and_are_named(tmp_path: Path) -> None:
    old = {"old.txt": prose(3), "old2.txt": prose(4), **others()}
    corpus(tmp_path / "old", old)
    near = " ".join([*prose(3).split()[:-2], "new", "end"])
    new = {"near.txt": near, "own.txt": prose(5), **{f"y{i}.txt": prose(200 + i) for i in range(12)}}
    earlier = str(tmp_path / "old" / "ingest")
    found = corpus(tmp_path / "new", new, near_duplicates="remove", earlier=[earlier])
    assert {path for path, reason in found.items() if reason} == {"near.txt"} and found[
        "near.txt"
    ] == "near_duplicate"
    why = explain("near.txt", tmp_path / "new" / "ingest", tmp_path / "new" / "curate")
    assert why.duplicate["similarity"] > 0.8 and why.duplicate["corpus"] == earlier
    assert why.duplicate["id"] == explain("old.txt", tmp_path / "old" / "ingest").id
    with pytest.raises(ConfigError, match="near duplicates are kept"):
        CurateConfig(earlier=[earlier], near_duplicates="keep")
    with pytest.raises(ConfigError, match="no-such-corpus has no documents"):
        corpus(tmp_path / "none", others(), near_duplicates="remove", earlier=["no-such-corpus"])


def test_settings_of_minhash_reach_the_comparison(tmp_path: Path) -> None:
    texts = {
        "a.txt": prose(6), "b.txt": " ".join([*prose(6).split()[:-12], *prose(7).split()[:12]]), **others(),
    }  # fmt: skip
    kept = corpus(tmp_path / "one", texts, near_duplicates="remove", near_duplicate_similarity=0.9)
    assert not any(kept.values())
    fine = SignatureConfig(shingle=1)
    found = corpus(
        tmp_path / "two", texts, near_duplicates="remove", near_duplicate_similarity=0.5, minhash=fine
    )
    assert found["b.txt"] == "near_duplicate"
    with pytest.raises(ValidationError):
        SignatureConfig(bands=0)


@pytest.mark.xdist_group("ray")
def test_engines_and_workers_write_equal_bytes(tmp_path: Path, ray_cluster: Any) -> None:
    texts = {"a.txt": prose(8), "b.txt": prose(8), **others()}
    written = {}
    for engine, workers in (("local", 1), ("local", 2), ("local", 3), ("ray", 1), ("ray", 2), ("ray", 3)):
        place = tmp_path / f"{engine}{workers}"
        executor = ExecutorConfig(engine=engine, workers=workers).executor()  # type: ignore[arg-type]
        corpus(place, texts, executor, near_duplicates="remove", filters=["gopher_repetition"])
        written[engine, workers] = {p.relative_to(place): p.read_bytes() for p in place.rglob("*.parquet")}
    assert len(written["local", 1]) >= 4 and all(files == written["local", 1] for files in written.values())


def test_contents_are_hashed_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for number, file in enumerate(files):
        file.write_text(f"text {number}")
    read = list[str]()
    hash_content = content_hashes.hash_content
    monkeypatch.setattr(content_hashes, "hash_content", lambda path: read.append(path) or hash_content(path))
    monkeypatch.setattr(content_hashes, "MIN_AGE", -1.0)  # the files are new
    paths = [*map(str, files)]
    first = ContentHashes(Catalog(tmp_path / "catalog.sqlite")).of(paths)
    assert ContentHashes(Catalog(tmp_path / "catalog.sqlite")).of(paths) == first and sorted(read) == paths
    times = files[0].stat()
    files[0].write_text("text 9")
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))  # a program can restore this time only
    again = ContentHashes(Catalog(tmp_path / "catalog.sqlite")).of([*paths, str(tmp_path / "none")])
    assert again[0] != first[0] and again[1] == first[1] and again[2] == "unreadable 2"
    assert sorted(read) == sorted([*paths, paths[0], str(tmp_path / "none")])


def test_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        ExecutorConfig(engine="ray").executor()
