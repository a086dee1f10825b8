"""Packing, shards and the loader: every token is predicted once, in an order that resumes anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tiny import make_document

from whorl.corpus.documents import document_id
from whorl.errors import BudgetError, ConfigError, DataError
from whorl.slots import Spec
from whorl.tokens.loader import TokenBatch, TokenProducer, open_batches
from whorl.tokens.packing import pack, random_windows
from whorl.tokens.shards import TokensConfig, TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer

TEXTS = [" ".join(map(str, range(i, i + 5 + i % 37))) for i in range(80)]
TOKENIZER = Tokenizer.train(TEXTS, 300)


def write(folder: Path, texts: list[str], split: str = "train", shard_tokens: int = 1024) -> Any:
    """Write a split; return its description."""
    documents = [make_document(text, i) for i, text in enumerate(texts)]
    folder.mkdir(exist_ok=True)
    TOKENIZER.save(folder)
    size = sum(d.n_bytes for d in documents)
    config = TokensConfig(shard_tokens=shard_tokens)
    return write_shards(documents, TOKENIZER, folder, split, config, total_bytes=size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write(folder, TEXTS)
    return folder


def read(folder: Path, n: int, **options: Any) -> list[dict[str, np.ndarray]]:
    """Return copies of n batches of 4 rows of 16 tokens."""
    settings: dict[str, Any] = {"seq_len": 16, "batch_size": 4, "seed": 3, "serial": True, **options}
    copies = []
    with open_batches(folder, "train", **settings) as batches:
        for slot, _ in zip(batches, range(n), strict=False):
            assert slot.length == slot.data.loss_mask.sum()
            copies.append({name: np.copy(array) for name, array in vars(slot.data).items()})
    return copies


def same(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> bool:
    return all(np.array_equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


@given(st.lists(st.integers(0, 70), max_size=30), st.integers(1, 20))
def test_pack_makes_each_token_but_bos_a_target_once(sizes: list[int], length: int) -> None:
    lengths = np.array(sizes, np.int64)
    starts = np.cumsum(lengths) - lengths
    ids = np.arange(lengths.sum(), dtype=np.uint32)
    rows = pack(starts, lengths, length)
    out = Spec.from_dataclass(TokenBatch, B=1, T=length).allocate()
    owner = np.repeat(np.arange(len(lengths)), lengths)
    seen: list[int] = []
    for row in range(len(rows)):
        rows.write(ids, np.array([row]), out, pad_id=2**31)
        mask, segments = out.loss_mask[0], out.segment_ids[0]
        targets, tokens = out.targets[0][mask], out.tokens[0][mask]
        assert (targets == tokens + 1).all() and (owner[targets] == owner[tokens]).all()
        assert (segments[mask] > 0).all() and (segments[~mask] == 0).all()
        for segment in range(1, segments.max() + 1):
            assert out.positions[0][segments == segment].tolist() == list(range((segments == segment).sum()))
        assert rows.single_segment[row] == (segments.max() == 1)
        seen += targets.tolist()
    first = set(starts[lengths > 0].tolist())
    assert sorted(seen) == [i for i in range(len(ids)) if i not in first]


def test_pack_rejects_zero_seq_len() -> None:
    with pytest.raises(ConfigError, match="rows of 0 tokens"):
        pack(np.zeros(1, np.int64), np.ones(1, np.int64), 0)


def test_trace_finds_document_and_byte_of_token(folder: Path) -> None:
    tokens = TokenSet(folder)
    stream = tokens.split("train")
    assert len(list(folder.glob("train-*.bin"))) > 1
    for number in (0, 7, 79):
        ids = stream.document(number)
        assert ids[0] == tokens.bos_id and ids[-1] == tokens.eos_id
        trace = tokens.trace(int(stream.starts[number]) + 5, "train", TOKENIZER)
        path = f"{number}.txt"
        assert (trace.document, trace.path) == (document_id("test", path, 0), path)
        assert trace.text_offset == len(TOKENIZER.decode(ids[1:5]))
    with pytest.raises(DataError, match="no token"):
        tokens.trace(len(stream))


def test_truncated_shard_and_missing_split_raise(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shard = next(copy.glob("train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match="size differs"):
        list(TokenSet(copy).split("train").iter_documents())
    with pytest.raises(DataError, match="no split"):
        TokenSet(copy).split("test")
    with pytest.raises(DataError, match="no token set"):
        TokenSet(tmp_path)


def test_order_is_permutation_and_resumes_anywhere(folder: Path) -> None:
    producer = TokenProducer(folder, "train", 16, 4, seed=3)
    n = producer.batches_per_epoch
    first, second = producer.order(0), producer.order(1)
    assert len(set(first.flatten().tolist())) == first.size == 4 * n
    assert not np.array_equal(first, second)
    mixed = set(np.flatnonzero(~producer.rows.single_segment).tolist())
    assert mixed and mixed <= set(first.flatten().tolist())  # every mixed row is in the epoch
    mixed_batches = ~producer.rows.single_segment[first].all(1)
    assert mixed_batches.sum() == -(-len(mixed) // 4)  # and they share batches
    assert first.size > len(producer.rows) - 4
    whole = read(folder, n + 5)
    assert same(read(folder, 8, start=n - 3), whole[n - 3 :])
    assert same(read(folder, n + 5, serial=False), whole)
    assert not same(read(folder, n + 5, seed=4), whole)
    flags = [bool(batch["single_segment"]) for batch in whole]
    assert flags == [bool((batch["segment_ids"].max(axis=1) == 1).all()) for batch in whole]
    assert set(flags) == {True, False}


def test_batches_do_not_depend_on_shards(folder: Path, tmp_path: Path) -> None:
    write(tmp_path, TEXTS, shard_tokens=1 << 20)
    assert len(list(tmp_path.glob("train-*.bin"))) == 1
    assert same(read(tmp_path, 30), read(folder, 30))


def test_ranks_share_the_same_batches(folder: Path) -> None:
    first, second = (read(folder, 30, rank=rank, world_size=2) for rank in (0, 1))
    for a, b, whole in zip(first, second, read(folder, 30), strict=True):
        assert np.array_equal(np.concatenate((a["tokens"], b["tokens"])), whole["tokens"])


def test_split_smaller_than_batch_raises(folder: Path) -> None:
    with pytest.raises(BudgetError, match="rows of 16 tokens"):
        read(folder, 1, batch_size=10**6)


def test_fingerprint_covers_ids_in_order(folder: Path, tmp_path: Path) -> None:
    ours = TokenSet(folder).split("train").fingerprint
    assert write(tmp_path / "same", TEXTS)["fingerprint"] == ours
    assert write(tmp_path / "order", TEXTS[::-1])["fingerprint"] != ours
    assert write(tmp_path / "letter", [*TEXTS[:-1], TEXTS[-1] + "!"])["fingerprint"] != ours


def test_empty_split_can_be_written_and_read(tmp_path: Path) -> None:
    write(tmp_path / "set", [], split="validation")
    stream = TokenSet(tmp_path / "set").split("validation")
    assert len(stream) == 0 and list(stream.iter_documents()) == []


def test_random_windows_of_a_memory_map_cover_every_position(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(100, 112, dtype=np.uint16))
    ids = np.load(tmp_path / "ids.npy", mmap_mode="r")
    inputs, targets = random_windows(ids, 200, 8, np.random.default_rng(0))
    assert inputs.shape == targets.shape == (200, 8) and inputs.dtype == targets.dtype == np.int64
    assert (targets == inputs + 1).all() and (np.diff(inputs) == 1).all()
    assert set(inputs[:, 0]) == {100, 101, 102, 103}  # the last window ends with the last id
    again = random_windows(ids, 200, 8, np.random.default_rng(0))
    assert np.array_equal(again[0], inputs)
    with pytest.raises(DataError, match="12 ids hold no window of 12"):
        random_windows(ids, 1, 12, np.random.default_rng(0))
