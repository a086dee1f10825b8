"""Few long texts are divided into documents, so that some can be held out."""

from __future__ import annotations

import gzip
import itertools
import random
import re
from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.corpus import Corpus, CurateConfig, IngestConfig, curate, document_files, fingerprint, ingest
from whorl.corpus.deduplication.near import clusters, verify
from whorl.corpus.readers import divide
from whorl.errors import DataError
from whorl.tracking.progress import Progress


def book(n_bytes: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    lines = [" ".join(str(rng.randrange(10**6)) for _ in range(9)) + "\n" for _ in range(n_bytes // 60)]
    return "".join(line + "\n" * (i % 7 == 0) for i, line in enumerate(lines))


@given(st.text(alphabet="ab \n\u00e9", max_size=300), st.integers(1, 40))
def test_parts_are_the_whole_text(text: str, size: int) -> None:
    parts = list(divide(text, size))
    assert "".join(parts) == text
    assert all(len(part.encode()) <= 8 * size + 300 for part in parts)
    assert text.isspace() or not any(part.isspace() for part in parts)


@pytest.mark.parametrize(
    ("n_files", "n_bytes", "options", "divided"),
    [
        (1, 300_000, {}, True), (3, 100_000, {}, True), (1, 300_000, {"max_document_bytes": 100_000}, True),
        (1, 300_000, {"split_bytes": 0}, False), (40, 9_000, {}, False),
        (40, 9_000, {"split_bytes": 2000}, True),
    ],
)  # fmt: skip
def test_few_files_are_divided(
    n_files: int, n_bytes: int, options: dict[str, int], divided: bool, tmp_path: Path
) -> None:
    source, out = tmp_path / "own", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for i in range(n_files):
        (source / f"{i}.txt").write_text(book(n_bytes, i))
    config = IngestConfig(sources=[str(source)], **options)
    found = ingest(config.model_copy(update={"fingerprint": fingerprint(config)}), out, Progress.silent())
    assert (found["documents"] > n_files) == divided
    assert found["bytes"] == sum(path.stat().st_size for path in source.iterdir())
    if divided and n_bytes < 1_000_000:
        sizes = CurateConfig(query="SELECT row, '' AS reason FROM attributes")
        split = curate(sizes, document_files(out), out, Progress.silent())["splits"]
        assert all(split[name]["documents"] for name in ("train", "validation", "test"))
        documents = list(Corpus(out, out).documents("test"))
        data = (source / documents[0].path).read_bytes()
        start = documents[0].offset
        assert data[start : start + documents[0].n_bytes].decode() == documents[0].text


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("n_small", [0, 40])
def test_text_file_of_any_size_is_read_in_pieces(
    tmp_path: Path, n_small: int, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("whorl.corpus.readers"), "SPLIT_READ_BYTES", 100_000)
    text = "\ufeff" + book(250_000) + "字" * 50_000 + "\n" + book(50_000, 1)
    (tmp_path / "in").mkdir()
    data = text.encode()
    (tmp_path / "in" / f"large{suffix}").write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    for n in range(n_small):
        (tmp_path / "in" / f"small{n:02d}.md").write_text(book(2000, n))
    (tmp_path / "out").mkdir()
    config = IngestConfig(sources=[str(tmp_path / "in")], max_document_bytes=60_000)
    found = ingest(config, tmp_path / "out", Progress.silent())
    assert found["quarantine"] == {}
    rows = [row for path in document_files(tmp_path / "out") for row in pq.read_table(path).to_pylist()]
    parts = [row for row in rows if row["path"].startswith("large")]
    assert "".join(row["text"] for row in parts) == text[1:] and len(parts) > 4
    begins = itertools.accumulate((len(row["text"].encode()) for row in parts[:-1]), initial=3)
    assert [row["offset"] for row in parts] == list(begins)


def splits_of(folder: Path, text: str, **options: int) -> dict[str, dict[str, int]]:
    source = folder / "in"
    source.mkdir(parents=True)
    (source / "a.txt").write_text(text)
    (folder / "out").mkdir()
    ingest(IngestConfig(sources=[str(source)], **options), folder / "out", Progress.silent())
    config = CurateConfig(rules={"mostly_digits": ""})
    found = curate(config, document_files(folder / "out"), folder / "out", Progress.silent())
    return dict(found["splits"])


@pytest.mark.parametrize("n_bytes", [10_000, 30_000])
def test_small_corpus_has_splits_or_advice_that_works(tmp_path: Path, n_bytes: int) -> None:
    text = book(n_bytes)
    assert all(split["documents"] for split in splits_of(tmp_path / "default", text).values())
    with pytest.raises(DataError) as caught:
        splits_of(tmp_path / "whole", text, split_bytes=n_bytes // 2)
    (advised,) = re.findall(r"ingest\.split_bytes=(\d+)", str(caught.value))
    assert all(
        split["documents"]
        for split in splits_of(tmp_path / "advised", text, split_bytes=int(advised)).values()
    )


@pytest.mark.parametrize("native", [True, False])
def test_pieces_of_one_text_are_no_near_duplicates(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in () if native else (clusters, verify):
        monkeypatch.setattr(module, "library", lambda: None)
    rng = random.Random(6)
    header = " ".join(str(rng.randrange(10**6)) for _ in range(120))
    pages = [header + "\n" + book(700, n).replace("\n\n", "\n") + "\n" for n in range(200)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("".join(pages))

    def reasons(files: str) -> tuple[dict[str, int], dict[str, int]]:
        out = tmp_path / files
        out.mkdir()
        config = IngestConfig(
            sources=[str(tmp_path / "in")], split_bytes=max(len(page) for page in pages) - 300
        )
        assert ingest(config, out, Progress.silent())["documents"] == 200 * len(files)
        found = curate(CurateConfig(rules={"mostly_digits": ""}), document_files(out), out, Progress.silent())
        counts = ({k: v["documents"] for k, v in found[name].items()} for name in ("dropped", "splits"))
        return next(counts), next(counts)

    removed, splits = reasons("a")
    assert not removed and sum(splits.values()) == 200 and min(splits.values()) >= 5
    (tmp_path / "in" / "b.txt").write_text("".join(page.replace(" 1", " 2", 1) for page in pages))
    removed, splits = reasons("ab")
    assert removed == {"near_duplicate": 200} and sum(splits.values()) == 200


def test_code_is_never_divided(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1\n" * 20_000)
    (tmp_path / "out").mkdir()
    found = ingest(IngestConfig(sources=[str(tmp_path / "own.py")]), tmp_path / "out", Progress.silent())
    assert found["documents"] == 1
