"""Semantic duplicates in `curate`: removed among the kept documents, named, and embedded once per encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from tests.corpus.deduplication.test_curated_duplicates import SPLITS, others, prose
from tests.recipes.steps.test_embedder_step import RECIPE
from tests.support.notes import write_notes

from whorl.corpus import CurateConfig, IngestConfig, curate, document_files, ingest
from whorl.corpus.deduplication.earlier import find_earlier
from whorl.corpus.deduplication.semantic.settings import SemanticConfig
from whorl.corpus.deduplication.semantic.vectors import TextEncoder, embed_files
from whorl.corpus.mapreduce import LocalPool, UnitStore
from whorl.corpus.provenance.explain import explain
from whorl.errors import ConfigError, DataError
from whorl.recipes import run_recipe
from whorl.recipes.recipe import parse_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress

HERE = "tests.corpus.deduplication.test_semantic_curate"
SYNONYMS = {"river": "stream", "stone": "rock", "light": "shine", "cloud": "mist"}


def open_bag(path: str) -> Callable[[Sequence[str]], NDArray[np.float32]]:
    """An encoder: sums of a random vector per word, the same for synonyms. `path` holds the width."""
    width = int(Path(path).read_text())
    same = {other: word for word, other in SYNONYMS.items()}

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        rows = []
        for text in texts:
            words = [same.get(w, w) for w in text.split()]
            rows.append(sum(np.random.default_rng([*w.encode()]).normal(size=width) for w in words))
        return np.array(rows, np.float32)

    return embed


def open_broken(path: str) -> Callable[[Sequence[str]], NDArray[np.float32]]:
    return lambda texts: np.ones((1, 3), np.float32)


def plain(seed: int) -> str:
    return "".join(c for c in prose(seed) if not c.isdigit())


def reworded(text: str) -> str:
    return " ".join(SYNONYMS.get(word, word) for word in text.split())


def documents(folder: Path, texts: dict[str, str]) -> list[Path]:
    data = folder / "data"
    data.mkdir(parents=True)
    for path, text in texts.items():
        (data / path).write_text(text)
    (folder / "ingest").mkdir()
    ingest(IngestConfig(sources=[str(data)], split_bytes=0), folder / "ingest", Progress.silent())
    return document_files(folder / "ingest")


def encoder(folder: Path, width: int = 64, **options: str) -> TextEncoder:
    path = folder / f"width{width}"
    path.write_text(str(width))
    own = {"address": f"bag{width}", "opener": f"{HERE}:open_bag", "path": str(path)}
    return TextEncoder(**(own | options))


def curated(folder: Path, files: list[Path], encoder: TextEncoder | None, **options: Any) -> dict[str, str]:
    (folder / "curate").mkdir(parents=True)
    config = CurateConfig(**SPLITS, semantic=SemanticConfig(encoder="bag", similarity=0.97), **options)
    curate(config, files, folder / "curate", Progress.silent(), encoder=encoder)
    paths = [p for file in files for p in pq.read_table(file)["path"].to_pylist()]
    return dict(
        zip(paths, pq.read_table(folder / "curate" / "selection.parquet")["reason"].to_pylist(), strict=True)
    )


def test_reworded_document_is_removed_and_named(tmp_path: Path) -> None:
    texts = {
        "a.txt": plain(1), "b.txt": reworded(plain(1)), "near.txt": plain(2) + " end", "near2.txt": plain(2),
        **others(),
    }  # fmt: skip
    files = documents(tmp_path, texts)
    found = curated(tmp_path / "first", files, encoder(tmp_path))
    dropped = {path: reason for path, reason in found.items() if reason}
    assert dropped == {"b.txt": "semantic_duplicate", "near2.txt": "near_duplicate"}
    why = explain("b.txt", tmp_path / "ingest", tmp_path / "first" / "curate").duplicate
    assert why["path"] == "a.txt" and why["kind"] == "semantic_duplicate" and why["similarity"] > 0.97
    found = curated(tmp_path / "order", files, encoder(tmp_path), near_duplicate_order="path DESC")
    assert {p for p, reason in found.items() if reason} == {"a.txt", "near.txt"}
    with pytest.raises(ConfigError, match="none is passed"):
        curated(tmp_path / "none", files, None)


def test_earlier_documents_stay_for_a_reworded_one(tmp_path: Path) -> None:
    documents(tmp_path / "old", {"old.txt": plain(1), **others()})
    files = documents(
        tmp_path / "new", {"b.txt": reworded(plain(1)), **{f"y{i}.txt": prose(50 + i) for i in range(12)}}
    )
    earlier = str(tmp_path / "old" / "ingest")
    found = curated(tmp_path / "out", files, encoder(tmp_path), earlier=[earlier])
    assert {p: reason for p, reason in found.items() if reason} == {"b.txt": "semantic_duplicate"}
    why = explain("b.txt", tmp_path / "new" / "ingest", tmp_path / "out" / "curate").duplicate
    assert (
        why["corpus"] == find_earlier(earlier).name
        and why["id"] == explain("old.txt", tmp_path / "old" / "ingest").id
    )


def test_vectors_are_kept_per_encoder_and_equal_for_any_workers(tmp_path: Path) -> None:
    files = documents(tmp_path, others())
    store = UnitStore(tmp_path / "units")
    one = embed_files(files, encoder(tmp_path), 8000, store, LocalPool(1))
    assert one[0].shape == (12, 64)
    broken = encoder(tmp_path, opener=f"{HERE}:open_bag", path=str(tmp_path / "gone"))
    again = embed_files(files, broken, 8000, store, LocalPool(2))  # found, so the encoder is not opened
    assert np.array_equal(one[0], again[0])
    other = embed_files(files, encoder(tmp_path, 32), 8000, store, LocalPool(1))
    assert other[0].shape == (12, 32)
    with pytest.raises(DataError, match=r"returned \[1, 3\] for 12 texts"):
        embed_files(
            files, encoder(tmp_path, address="x", opener=f"{HERE}:open_broken"), 8000, store, LocalPool(1)
        )


def test_recipe_uses_an_embedder_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_notes(tmp_path))
    store = Store(tmp_path / "store")
    made = run_recipe(parse_recipe(RECIPE, "finder.toml"), store, Progress.silent()).artifacts
    address = made["embedder"].address
    again = f"""{RECIPE}
[steps.distinct]
uses = "curate"
parents = ["ingest"]
validation_bytes = 4000
test_bytes = 2000
max_held_out_fraction = 0.3
semantic = {{ encoder = "ENCODER", similarity = 1.0 }}
"""

    def distinct(encoder: str) -> Any:
        recipe = parse_recipe(again.replace("ENCODER", encoder), "finder.toml")
        return run_recipe(recipe, store, Progress.silent(), until="distinct").artifacts["distinct"]

    found = distinct(address)
    assert (
        found.config["semantic"]["digest"] == address and (found.path / "duplicates-00000.parquet").exists()
    )
    with pytest.raises(ConfigError, match="is an artifact of tokens"):
        distinct(made["tokens"].address)
