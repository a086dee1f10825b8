"""Near duplicates: native and numpy paths equal the reference, removals are verified, and any engine gives equal bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from whorl.corpus.deduplication import shingles as shingling
from whorl.corpus.deduplication.near import clusters as clustering
from whorl.corpus.deduplication.near import minhash as signing
from whorl.corpus.deduplication.near import stages
from whorl.corpus.deduplication.near import verify as verifying
from whorl.corpus.deduplication.near.minhash import band_keys, minhash_signature_reference, minhash_signatures
from whorl.corpus.deduplication.near.outputs import write_duplicates
from whorl.corpus.deduplication.near.stages import NearDuplicates, find_clusters, find_near_duplicates
from whorl.corpus.deduplication.settings import MinHashConfig, collision_probability
from whorl.corpus.deduplication.shingles import jaccard_similarity
from whorl.corpus.mapreduce import LocalPool, UnitStore
from whorl.errors import ConfigError

TEXT = st.builds(
    lambda text, cut: text.encode()[cut:], st.text("ab_ \n.é1字京กあ。𠮷😀", max_size=40), st.integers(0, 3)
)
TEXTS = st.lists(TEXT | TEXT.map(lambda data: data[:-1]), min_size=1, max_size=6)
CONFIGS = st.builds(
    MinHashConfig,
    hashes=st.sampled_from([5, 64, 70]), bands=st.just(2), rows=st.just(2), shingle=st.sampled_from([1, 2, 5]),
    unit=st.sampled_from(["words", "characters"]), digits=st.sampled_from(["keep", "zero"]),
    similarity=st.sampled_from([0.3, 0.5, 1.0]),
)  # fmt: skip


@pytest.fixture(params=["native", "numpy"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        for module in (shingling, signing, clustering, verifying):
            monkeypatch.setattr(module, "library", lambda: None)
    elif shingling.library() is None:
        pytest.skip("no compiler")
    return str(request.param)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, CONFIGS)
@pytest.mark.usefixtures("path")
def test_minhash_block_equals_reference(texts: list[bytes], config: MinHashConfig) -> None:
    want = np.array([minhash_signature_reference(text, config) for text in texts])
    assert np.array_equal(minhash_signatures(texts, config), want)


@pytest.mark.usefixtures("path")
def test_shingle_sets_are_sorted_and_distinct() -> None:
    rng = random.Random(3)
    texts = ["", "one", "a b " * 500, *(" ".join(words(rng, n)) for n in (1, 2, 7, 300, 5000))]
    block = shingling.TextBlock.of([text.encode() for text in texts])
    for size in (1, 3):
        config = MinHashConfig(shingle=size)
        found, first = shingling.unique_shingles(block, config)
        assert first[-1] == len(found)
        for text, begin, end in zip(texts, first, first[1:], strict=False):
            want = sorted(shingling.shingle_hashes(text.encode(), config))
            assert found[begin:end].tolist() == want


def words(rng: random.Random, n: int) -> list[str]:
    return [f"w{rng.randrange(10**6)}" for _ in range(n)]


def clusters(texts: list[str], folder: Path) -> NDArray[np.int64]:
    store = UnitStore(folder / "units")
    first = np.arange(len(texts))
    return find_clusters(write(folder / "in", texts), MinHashConfig(), first, store, LocalPool())


def mutate(rng: random.Random, text: list[str], changes: int) -> list[str]:
    out = list(text)
    for _ in range(changes):
        out[rng.randrange(len(out))] = f"m{rng.randrange(10**6)}"
    return out


def test_minhash_agreement_estimates_jaccard() -> None:
    rng = random.Random(0)
    errors = []
    for changes in range(0, 60, 2):
        text = words(rng, 400)
        a, b = " ".join(text).encode(), " ".join(mutate(rng, text, changes)).encode()
        sa, sb = minhash_signatures([a, b])
        errors.append(float((sa == sb).mean()) - jaccard_similarity(a, b))
    assert abs(np.mean(errors)) < 0.02  # unbiased
    assert np.abs(errors).max() < 4 * 0.044


@pytest.mark.usefixtures("path")
def test_clusters_equal_planted_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "RECORDS_PER_PARTITION", 2000)  # several partitions
    rng = random.Random(1)
    texts, family = [], []
    for f in range(100):
        original = words(rng, 300)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            texts.append(" ".join(mutate(rng, original, rng.randrange(6))))
            family.append(f)
    assert clusters(texts, tmp_path).tolist() == [family.index(f) for f in family]


def test_bucket_collisions_follow_the_curve() -> None:
    rng = random.Random(3)
    for changes in (30, 50):
        pairs = [(a, mutate(rng, a, changes)) for a in (words(rng, 200) for _ in range(120))]
        texts = [" ".join(t).encode() for pair in pairs for t in pair]
        signatures = minhash_signatures(texts)
        similarity = [jaccard_similarity(a, b) for a, b in zip(texts[::2], texts[1::2], strict=True)]
        for bands, rows in ((32, 4), (64, 2), (14, 8), (5, 3)):
            keys = band_keys(signatures, MinHashConfig(bands=bands, rows=rows))
            shared = (keys[::2] == keys[1::2]).any(axis=1).mean()
            expected = [collision_probability(s, bands, rows) for s in similarity]
            error = np.sqrt(np.sum([p * (1 - p) for p in expected])) / len(expected)
            assert abs(shared - np.mean(expected)) < 4 * error + 1e-9


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_connected_components_match_naive_sets(pairs: list[tuple[int, int]]) -> None:
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    naive = [{i} for i in range(31)]
    for a, b in pairs:
        merged = naive[a] | naive[b]
        for member in merged:
            naive[member] = merged
    found = clustering.connected_components(ends[:, 0], ends[:, 1], 31)
    assert found.tolist() == [min(group) for group in naive]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_first_occurrence_matches_list_index(rows: list[tuple[int, int]]) -> None:
    first = clustering.first_occurrence(np.array(rows, np.uint64))
    assert first.tolist() == [rows.index(row) for row in rows]


def removable(texts: list[bytes], config: MinHashConfig) -> NDArray[np.bool_]:
    """Return which of these documents are near duplicates of an earlier one that stays."""
    shingles, first = shingling.unique_shingles(shingling.TextBlock.of(texts), config)
    none = np.zeros(len(texts), np.int64)
    sets = verifying.ShingleSets([shingles], none, first[:-1], np.diff(first))
    return verifying.matches(sets, none, none, none == 1, config)[0] >= 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.sampled_from([0.3, 0.5, 1.0]))
@pytest.mark.usefixtures("path")
def test_removals_are_pairs_of_that_exact_similarity(texts: list[bytes], threshold: float) -> None:
    config = MinHashConfig(similarity=threshold, hashes=128, bands=128, rows=1)
    kept: list[bytes] = []
    for text, remove in zip(texts, removable(texts, config), strict=True):
        similar = [jaccard_similarity(text, other) for other in kept]
        assert not remove or max(similar) >= threshold
        assert (
            remove or not similar or max(similar) < max(threshold, 0.5)
        )  # 128 bands of a row miss none above
        if not remove:
            kept.append(text)


@pytest.mark.parametrize("n", [5, verifying.MAX_COMPARED_ALL, 40])
def test_native_removal_equals_numpy(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if verifying.library() is None:
        pytest.skip("no compiler")
    rng = random.Random(n)
    texts = []
    for _ in range(n):
        original = words(rng, 60)
        texts += [" ".join(mutate(rng, original, changes)).encode() for changes in (0, 2, 20)]
    config = MinHashConfig(similarity=0.5)
    native = removable(texts, config)
    monkeypatch.setattr(verifying, "library", lambda: None)
    assert native.tolist() == removable(texts, config).tolist()
    assert n <= sum(native) < 2 * n


@pytest.mark.usefixtures("path")
def test_few_that_stay_are_compared_without_a_common_band() -> None:
    rng = random.Random(5)
    original = words(rng, 100)
    texts = [" ".join(original).encode(), " ".join(mutate(rng, original, 4)).encode()]
    config = MinHashConfig(similarity=0.5, hashes=64, bands=1, rows=64)  # a band that no other text shares
    assert jaccard_similarity(*texts) >= 0.5
    assert removable(texts, config).tolist() == [False, True]


def test_bands_need_hashes() -> None:
    with pytest.raises(ConfigError, match="33 bands of 4 rows need 132 hashes"):
        MinHashConfig(bands=33)


def write(folder: Path, texts: Sequence[str], files: int = 3, name: str = "d") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    per = -(-len(texts) // files)
    for f in range(files):
        rows = range(f * per, min((f + 1) * per, len(texts)))
        table: Any = pa.table({"id": [f"{name}{i}" for i in rows], "text": [texts[i] for i in rows]})
        pq.write_table(table, folder / f"documents-{f:05d}.parquet", row_group_size=7)
    return sorted(folder.glob("documents-*"))


def corpus(n: int = 60) -> list[str]:
    rng = random.Random(4)
    texts = []
    while len(texts) < n:
        original = words(rng, 80)
        texts += [" ".join(mutate(rng, original, c)) for c in range(rng.choice([1, 1, 3]))]
    rng.shuffle(texts)
    return texts[:n]


def run(
    files: list[Path], units: Path, executor: Any = None, similarity: float = 0.5, **more: Any
) -> NearDuplicates:
    return find_near_duplicates(
        files, MinHashConfig(similarity=similarity), UnitStore(units), executor or LocalPool(), **more
    )


def removed_rows(
    found: NearDuplicates, files: list[Path], out: Path, **more: Any
) -> dict[int, tuple[str, float]]:
    out.mkdir(exist_ok=True)
    write_duplicates(found, files, out, **more)
    rows = [r for p in sorted(out.glob("duplicates-*")) for r in pq.read_table(p).to_pylist()]
    assert {r["kind"] for r in rows} <= {"near_duplicate"}
    return {r["row"]: (r["matched_id"], r["similarity"]) for r in rows}


def test_removal_over_files_equals_pairwise_reference(tmp_path: Path) -> None:
    texts = [*corpus(36), "", "", "one two", "one two", "..."]
    files = write(tmp_path / "in", texts)
    found = removed_rows(run(files, tmp_path / "units"), files, tmp_path / "out")
    kept: list[int] = []
    for i, text in enumerate(texts):
        similar = {j: jaccard_similarity(text.encode(), texts[j].encode()) for j in kept}
        best = [j for j in kept if similar[j] >= 0.5]
        assert (i in found) == bool(best)
        if best:
            assert found[i] == (f"d{best[0]}", pytest.approx(similar[best[0]]))
        else:
            kept.append(i)
    assert len(found) > 5


def test_chain_loses_its_middle_only(tmp_path: Path) -> None:
    base = [f"w{i}" for i in range(40)]
    texts = [" ".join(base[a : a + 30]) for a in (5, 0, 10)]  # the first is similar to both, which are not
    files = write(tmp_path / "in", texts, 1)
    assert set(removed_rows(run(files, tmp_path / "u"), files, tmp_path / "a")) == {1, 2}
    ranks = np.array([2, 0, 1])
    chain = removed_rows(run(files, tmp_path / "u", ranks=ranks), files, tmp_path / "b")
    assert jaccard_similarity(texts[1].encode(), texts[2].encode()) < 0.5
    assert chain.keys() == {0} and chain[0][0] == "d1"


def test_ranks_and_candidates_choose_who_stays(tmp_path: Path) -> None:
    text = corpus(1)[0]
    files = write(tmp_path / "in", [text] * 5, 2)
    found = removed_rows(
        run(files, tmp_path / "u", ranks=np.array([4, 3, 0, 1, 2]), candidates=np.array([1, 1, 0, 1, 1], bool)),
        files, tmp_path / "out",
    )  # fmt: skip
    assert found == {0: ("d3", 1.0), 1: ("d3", 1.0), 4: ("d3", 1.0)}


def test_earlier_corpus_stays_and_is_named(tmp_path: Path) -> None:
    texts = corpus()
    earlier = write(tmp_path / "old", [texts[3], texts[3], texts[9]], 2, "old")
    files = write(tmp_path / "in", texts)
    units = tmp_path / "units"
    alone = removed_rows(run(files, units), files, tmp_path / "a")
    found = removed_rows(run(files, units, earlier=earlier), files, tmp_path / "b", earlier=earlier)
    assert found[3] == ("old0", 1.0) and found[9] == ("old2", 1.0) and set(alone) <= set(found)


def test_many_equal_documents_leave_one(tmp_path: Path) -> None:
    n = int(os.environ.get("WHORL_TEST_EQUAL_DOCUMENTS", "50000"))
    table: Any = pa.table({"id": [f"{i:07d}" for i in range(n)], "text": ["one two three four five six"] * n})
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "documents-00000.parquet")
    found = run([tmp_path / "in" / "documents-00000.parquet"], tmp_path / "units")
    assert len(found.removed) == n - 1 and not found.matched.any()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("[!.]*/*"))}
