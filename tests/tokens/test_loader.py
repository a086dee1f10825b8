"""The loader: a batch depends on its number only, single-segment batches need no mask, ranks share batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.tiny import make_document

from whorl.tokens.loader import open_batches
from whorl.tokens.shards import TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer


def token_set(folder: Path, texts: list[str], split: str = "train") -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer.train(["0 1 2 3 4 5"], 300)
    documents = [make_document(text, i) for i, text in enumerate(texts)]
    return write_shards(documents, tokenizer, folder, split)


TEXTS = [" ".join(map(str, range(i, i + 5 + i % 37))) for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader") / "set"
    token_set(folder, TEXTS)
    return folder


def test_single_segment_flag_matches_rows(folder: Path) -> None:
    flags = []
    with open_batches(folder, "train", seq_len=16, batch_size=4, serial=True) as batches:
        for slot, _ in zip(batches, range(80), strict=False):
            segments = slot.data.segment_ids.max(axis=1)
            assert bool(slot.data.single_segment) == bool((segments == 1).all())
            assert slot.length == slot.data.loss_mask.sum()
            flags.append(bool(slot.data.single_segment))
    assert set(flags) == {True, False}


def test_ranks_share_the_same_batches(folder: Path) -> None:
    def tokens(rank: int, world: int) -> list[np.ndarray]:
        with open_batches(
            folder, "train", seq_len=16, batch_size=4, seed=5, rank=rank, world_size=world, serial=True
        ) as batches:
            return [slot.data.tokens.copy() for slot, _ in zip(batches, range(30), strict=False)]

    halves = [np.concatenate(both) for both in zip(tokens(0, 2), tokens(1, 2), strict=True)]
    assert np.array_equal(halves, tokens(0, 1))


def test_seed_changes_order(folder: Path) -> None:
    def first(seed: int) -> bytes:
        with open_batches(folder, "train", seq_len=16, batch_size=4, seed=seed, serial=True) as batches:
            return next(batches).data.tokens.tobytes()

    assert first(1) == first(1) != first(2)


def test_fingerprint_covers_ids_in_order(folder: Path, tmp_path: Path) -> None:
    ours = TokenSet(folder).split("train").fingerprint
    assert token_set(tmp_path / "same", TEXTS)["fingerprint"] == ours
    assert token_set(tmp_path / "order", TEXTS[::-1])["fingerprint"] != ours
    assert token_set(tmp_path / "letter", [*TEXTS[:-1], TEXTS[-1] + "!"])["fingerprint"] != ours


def test_empty_split_can_be_written_and_read(tmp_path: Path) -> None:
    token_set(tmp_path / "set", [], split="validation")
    stream = TokenSet(tmp_path / "set").split("validation")
    assert len(stream) == 0 and list(stream.iter_documents()) == []
