"""Curate: attributes, the selection query, and splits without near duplicates across them."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from whorl.corpus import (
    Corpus,
    CurateConfig,
    Document,
    IngestConfig,
    curate,
    document_files,
    document_writer,
    ingest,
)
from whorl.corpus.config import DEFAULT_QUERY
from whorl.corpus.measures.text import text_attributes
from whorl.errors import ConfigError, DataError
from whorl.tracking.progress import Progress

WORD = re.compile(rb"[A-Za-z0-9_\x80-\xff]+")


class CorpusOf:
    """A corpus made from texts: ingest and curate folders, reader, and the summary of curate."""

    def __init__(self, folder: Path, texts: dict[str, str], source: str = "", **options: Any) -> None:
        self.ingest, self.curate = folder / "ingest", folder / "curate"
        self.ingest.mkdir(parents=True)
        self.curate.mkdir()
        source = source or str(folder / "data")
        for path, text in texts.items():
            (folder / "data" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "data" / path).write_text(text)
        config = IngestConfig(sources=[source], equal_files="all")  # tests of `curate` need equal documents
        ingest(config, self.ingest, Progress.silent())
        files = document_files(self.ingest)
        self.summary = curate(CurateConfig(**options), files, self.curate, Progress.silent())

    @property
    def corpus(self) -> Corpus:
        return Corpus(self.ingest, self.curate)

    def rows(self) -> list[dict[str, Any]]:
        """Document, attributes and selection of every row, joined by index."""
        places = ((self.ingest, "documents-*"), (self.curate, "attributes-*"), (self.curate, "selection.*"))
        files = [sorted(folder.glob(pattern)) for folder, pattern in places]
        parts = [[row for f in some for row in pq.read_table(f).to_pylist()] for some in files]
        return [{**d, **a, **s} for d, a, s in zip(*parts, strict=True)]

    def reasons(self) -> dict[str, str]:
        """Why each path was dropped; "" if it was kept."""
        return {row["path"]: row["reason"] for row in self.rows()}


def prose(rng: random.Random, n: int) -> str:
    return "\n".join(" ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(8)) for _ in range(n))


def random_texts(n: int, seed: int = 0) -> dict[str, str]:
    rng = random.Random(seed)
    return {f"{i:04d}.txt": prose(rng, rng.randrange(10, 40)) for i in range(n)}


STDLIB = """
import json, sys
from pathlib import Path
from whorl.corpus import CurateConfig, IngestConfig, curate, document_files, ingest
from whorl.tracking.progress import Progress
documents, curated = map(Path, sys.argv[1:])
ingest(IngestConfig(), documents, Progress.silent())
summary = curate(CurateConfig(), document_files(documents), curated, Progress.silent())
status = Path("/proc/self/status")  # not ru_maxrss: a child starts with that of its parent
lines = status.read_text().splitlines() if status.exists() else ["VmHWM: 0"]
print(json.dumps([summary, next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024]))
"""


class StdlibCorpus(CorpusOf):
    """The corpus of the standard library, made by a process of its own. peak: its peak memory in bytes; 0: unknown."""

    def __init__(self, folder: Path) -> None:
        self.ingest, self.curate = folder / "ingest", folder / "curate"
        for path in (self.ingest, self.curate):
            path.mkdir()
        command = [sys.executable, "-c", STDLIB, self.ingest, self.curate]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
        self.summary, self.peak = json.loads(done.stdout)


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> StdlibCorpus:
    return StdlibCorpus(tmp_path_factory.mktemp("stdlib"))


def shingles(text: str) -> set[tuple[bytes, ...]]:
    words = WORD.findall(text.encode())
    return set(zip(words, words[1:], words[2:], words[3:], words[4:], strict=False))


def test_stdlib_splits_share_no_near_duplicates(stdlib: CorpusOf) -> None:
    """Exact Jaccard similarity of each held-out document with the other splits, computed independently."""
    splits = {name: list(stdlib.corpus.documents(name)) for name in ("train", "validation", "test")}
    held_out = [(name, shingles(d.text)) for name in ("validation", "test") for d in splits[name]]
    where: dict[tuple[bytes, ...], list[int]] = {}
    for number, (_, found) in enumerate(held_out):
        for shingle in found:
            where.setdefault(shingle, []).append(number)
    for split, document in [(name, d) for name in ("train", "validation") for d in splits[name]]:
        own = shingles(document.text)
        shared = Counter(number for shingle in own & where.keys() for number in where[shingle])
        for number, n in shared.items():
            other, found = held_out[number]
            assert other == split or n / (len(own) + len(found) - n) < 0.6, (document.path, other)


def test_stdlib_split_sizes_and_clusters(stdlib: CorpusOf) -> None:
    splits = stdlib.summary["splits"]
    for name in ("validation", "test"):
        assert 850_000 < splits[name]["bytes"] <= 1_000_000
        assert splits[name]["documents"] >= 40
        assert splits[name]["largest_document_fraction"] < 0.12
    rows = stdlib.rows()
    assert {r["licence"] for r in rows} >= {"PSF-2.0"}
    placed = {(row["cluster"], row["split"]) for row in rows if row["split"]}
    assert len(placed) == len({cluster for cluster, _ in placed})
    # The code-page tables are marked as generated.
    reasons = stdlib.reasons()
    assert {reasons[f"encodings/cp125{digit}.py"] for digit in range(9)} == {"generated"}
    assert reasons["ast.py"] == ""
    codecs = [f"encodings/{name}.py" for name in ("big5", "gbk", "euc_kr")]
    assert len({r["cluster"] for r in rows if r["path"] in codecs}) == 1


def test_corpus_streams_selected_documents(stdlib: CorpusOf) -> None:
    rows = stdlib.rows()
    for split in ("train", "validation", "test"):
        selected = [row for row in rows if row["split"] == split]
        expected = [Document(**{k: row[k] for k in Document.__dataclass_fields__}) for row in selected]
        assert list(stdlib.corpus.documents(split)) == expected
        assert stdlib.corpus.count(split) == len(expected) == stdlib.summary["splits"][split]["documents"]
        assert stdlib.corpus.bytes(split) == stdlib.summary["splits"][split]["bytes"]
    with pytest.raises(ConfigError, match="unknown split 'tset'"):
        next(stdlib.corpus.documents("tset"))


def test_curate_funnel_adds_up(stdlib: CorpusOf) -> None:
    funnel, dropped = stdlib.summary["funnel"], stdlib.summary["dropped"]
    for before, after in itertools.pairwise(funnel[:-1]):
        lost = dropped[after["stage"].removeprefix("without ")]
        assert before["documents"] - after["documents"] == lost["documents"]
        assert before["bytes"] - after["bytes"] == lost["bytes"]
    assert funnel[-2]["bytes"] == sum(s["bytes"] for s in stdlib.summary["splits"].values())
    train = stdlib.summary["splits"]["train"]
    assert funnel[-1] == {"stage": "train", "documents": train["documents"], "bytes": train["bytes"]}


def test_long_lines_drop_code_but_not_prose(tmp_path: Path) -> None:
    texts, paragraph = random_texts(40), prose(random.Random(1), 60).replace("\n", " ") + "\n"
    long = {"a.md": paragraph, "b.js": paragraph, "c.unknown": paragraph + "."}
    kept = dict.fromkeys(texts, "")
    found = CorpusOf(tmp_path, texts | long, near_duplicates="keep").reasons()
    assert found == kept | {"a.md": "", "b.js": "exact_duplicate", "c.unknown": ""}
    again = CorpusOf(tmp_path / "again", texts | {"b.js": paragraph})
    assert again.reasons() == kept | {"b.js": "long_lines"}


def test_split_is_stable_when_corpus_grows(tmp_path: Path) -> None:
    config = {"test_bytes": 10_000, "validation_bytes": 10_000, "max_cluster_fraction": 1.0}
    small = CorpusOf(tmp_path / "a", random_texts(200, seed=3), **config)
    # Ids contain the source's name, so the second corpus uses the same folder.
    for i in range(20):
        (tmp_path / f"a/data/new{i}.txt").write_text(prose(random.Random(i), 20))
    grown = CorpusOf(tmp_path / "b", {}, source=str(tmp_path / "a/data"), **config)
    before, after = ({d.path for d in made.corpus.documents("test")} for made in (small, grown))
    assert len(before & after) >= len(before) / 2
    assert len(before) < 20  # an independent draw of 20 from 220 would share two


@pytest.mark.parametrize("seed", range(3))
def test_small_corpus_is_split_for_any_seed(tmp_path: Path, seed: int) -> None:
    """Documents that do not fit are skipped."""
    rng = random.Random(seed)
    texts = {f"{i}.txt": prose(rng, 40 if i % 2 else 4) for i in range(16)}
    splits = CorpusOf(tmp_path, texts, seed=seed).summary["splits"]
    assert splits["test"]["documents"] >= 1 and splits["validation"]["documents"] >= 1


def test_split_rejects_budget_below_every_document(tmp_path: Path) -> None:
    texts = {f"{i}.txt": prose(random.Random(i), 50) for i in range(30)}
    message = f"may have 1000 bytes, but the smallest of 30 clusters .* has {min(map(len, texts.values()))}"
    with pytest.raises(DataError, match=message):
        CorpusOf(tmp_path, texts, test_bytes=1000)


def test_split_rejects_single_document(tmp_path: Path) -> None:
    only = {"only.txt": "A text of one line " * 6}  # too short to be divided
    with pytest.raises(DataError, match="too small to hold out a test split"):
        CorpusOf(tmp_path / "a", only)
    corpus = CorpusOf(tmp_path / "b", only, test_bytes=0, validation_bytes=0).corpus
    assert corpus.count("train") == 1 and corpus.count("test") == 0


def test_curate_query_sets_reasons(tmp_path: Path) -> None:
    reason = "CASE WHEN path < '0010' THEN 'early' END AS reason"
    query = f"SELECT row, {reason} FROM attributes WHERE path < '0045'"
    made = CorpusOf(tmp_path, random_texts(50), query=query)
    assert list(made.reasons().values()) == ["early"] * 10 + [""] * 35 + ["not_selected"] * 5


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT NULL AS row, '' AS reason", "unknown rows"),
        ("SELEC row", "query fails"),
        ("SELECT row FROM attributes", "query fails"),
        ("SELECT colour AS row, '' AS reason FROM attributes", "query fails"),
        ("SELECT 0 AS row, '' AS reason FROM attributes", "unknown rows"),
        ("SELECT 99 AS row, '' AS reason", "unknown rows"),
        ("SELECT 'x' AS row, '' AS reason", "query fails"),
        ("SELECT 0 AS row, content AS reason FROM read_text('/etc/hostname')", "query fails"),
        ("SELECT 0 AS row, '' AS reason); COPY attributes TO 'stolen.csv'; SELECT (1", "query fails"),
    ],
)
def test_curate_rejects_query(tmp_path: Path, query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CorpusOf(tmp_path, random_texts(3), query=query)


def test_docs_show_default_query() -> None:
    page = Path(__file__).parents[2] / "docs/corpus.md"
    assert f"```sql\n{DEFAULT_QUERY}\n```" in page.read_text()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_stdlib_pipeline_needs_bounded_memory(stdlib: StdlibCorpus) -> None:
    assert 0 < stdlib.peak < 500_000_000


def test_curate_rejects_empty_selection(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="keeps none of 2 documents: too_short 2"):
        CorpusOf(tmp_path, {"a.txt": "short", "b.txt": "shorter"})


def test_block_sizes_do_not_change_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries of files, row groups and blocks do not change the documents."""
    one = CorpusOf(tmp_path, random_texts(120, seed=4))
    monkeypatch.setattr(document_writer, "ROW_GROUP_BYTES", 5_000)
    monkeypatch.setattr(document_writer, "FILE_BYTES", 30_000)
    # By import_module: as an attribute of its package, this name is the function.
    monkeypatch.setattr(import_module("whorl.corpus.measures.run"), "BATCH_CHARACTERS", 2_000)
    many = CorpusOf(tmp_path / "again", {}, source=str(tmp_path / "data"))
    files = document_files(many.ingest)
    assert len(files) > 3 and many.summary == one.summary
    assert len(list(many.curate.glob("attributes-*.parquet"))) == len(files)
    for split in ("train", "validation", "test"):
        assert list(many.corpus.documents(split)) == list(one.corpus.documents(split))


def test_corpus_rejects_selection_of_other_corpus(tmp_path: Path) -> None:
    a, b = CorpusOf(tmp_path / "a", random_texts(40)), CorpusOf(tmp_path / "b", random_texts(41))
    with pytest.raises(DataError, match="a selection of 41 documents"):
        Corpus(a.ingest, b.curate)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"# Autogenerated by Sphinx on Monday\n", True),
        (b'""" Codec cp1250 generated from \'MAPPINGS/CP1250.TXT\' with gencodec.py.\n', True),
        (b"# This file is generated by mkstringprep. \n", True),
        (b"// @generated\n", True),
        (b"/* DO NOT EDIT */", True),
        (b'"""An abstract syntax tree can be generated by passing a flag to compile().\n', False),
        (b'"""Parser engine for the grammar tables generated by pgen.\n', False),
        (b"x = 1\n" * 200 + b"# Autogenerated\n", False),
    ],
)
def test_generated_attribute_from_head(head: bytes, expected: bool) -> None:
    assert text_attributes(head, len(head))["generated"] is expected


def test_near_duplicates_are_removed_by_default(tmp_path: Path) -> None:
    texts = random_texts(30)
    words = texts["0003.txt"].split(" ")
    near = [*words[: len(words) // 2], "changed", *words[len(words) // 2 :]]
    texts |= {"0003copy.txt": " ".join(near)}
    kept = CorpusOf(tmp_path / "keep", texts, validation_bytes=0, test_bytes=0, near_duplicates="keep")
    removed = CorpusOf(tmp_path / "remove", texts, validation_bytes=0, test_bytes=0)
    assert not any(kept.reasons().values())
    assert {p: r for p, r in removed.reasons().items() if r} == {"0003copy.txt": "near_duplicate"}
    assert removed.summary["dropped"]["near_duplicate"]["documents"] == 1
    alone = CorpusOf(
        tmp_path / "strict", texts, validation_bytes=0, test_bytes=0, near_duplicate_similarity=1.0
    )
    assert not any(alone.reasons().values())


def test_one_rule_changes_on_top_of_the_default_query(tmp_path: Path) -> None:
    texts = ["A short fortune of a few words.", "x" * 150, "short"]
    (tmp_path / "in").mkdir()
    for n, text in enumerate(texts):
        (tmp_path / "in" / f"{n}.txt").write_text(text)
    (tmp_path / "out").mkdir()
    ingest(IngestConfig(sources=[str(tmp_path / "in")], split_bytes=0), tmp_path / "out", Progress.silent())
    sizes: dict[str, Any] = {"validation_bytes": 0, "test_bytes": 0}
    for rules, dropped in (
        ({}, {"too_short": 2}),
        ({"too_short": "n_bytes < 20"}, {"too_short": 1}),
        ({"too_short": ""}, {}),
        ({"too_short": "", "no_spaces": "space_fraction = 0"}, {"no_spaces": 2}),
    ):
        config = CurateConfig(rules=rules, **sizes)
        found = curate(config, document_files(tmp_path / "out"), tmp_path / "out", Progress.silent())
        assert {name: count["documents"] for name, count in found["dropped"].items()} == dropped
    assert CurateConfig(rules={}).selection_query == DEFAULT_QUERY
    with pytest.raises(ConfigError, match=r"curate\.query replaces it"):
        CurateConfig(query="SELECT row, '' AS reason FROM attributes", rules={"too_short": ""})
    with pytest.raises(ConfigError, match="removes the rule 'too_shrt'"):
        CurateConfig(rules={"too_shrt": ""})
