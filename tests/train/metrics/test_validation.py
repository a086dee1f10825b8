"""Validation rows: packed as training rows are, with every target and byte once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.tiny import make_document
from tests.support.train.pretraining import train_notes
from tests.support.train.tiny import Notes, job

from whorl.models import Transformer
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.shards import TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.train.lm.pretrain import pretrain
from whorl.train.metrics.validation import (
    HELD_OUT_ROWS,
    Validator,
    held_out_bytes_per_target,
    held_out_rows,
)

SHORT = [f"{word} {'é' * (n % 5)}{n}" for n, word in enumerate(["ab", "cabbage", "x", "ba ba", "日本"] * 6)]


def make_set(folder: Path, validation: list[str], train: list[str] = SHORT) -> Tokenizer:
    tokenizer = Tokenizer.train(["ab cd é " * 9], 300)
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    for name, texts in (("train", train * 4), ("validation", validation)):
        write_shards([make_document(t, i) for i, t in enumerate(texts)], tokenizer, folder, name)
    return tokenizer


@pytest.mark.parametrize("texts", [SHORT, [*SHORT[:5], "ab é cd " * 20], ["ab é cd " * 30]])
def test_packed_rows_score_as_their_documents(texts: list[str], tmp_path: Path) -> None:
    """The same loss as one document a row, the same targets, and the bytes of the texts."""
    tokenizer = make_set(tmp_path, texts)
    wanted = job(tmp_path)
    torch.manual_seed(0)
    model = Transformer(wanted.model).eval()
    rows = held_out_rows(wanted)
    assert rows is not None and len(rows["tokens"]) <= HELD_OUT_ROWS
    assert ("segments" in rows) == (len(texts) > 1)
    nll, count, n = 0.0, 0, wanted.seq_len
    with torch.no_grad():
        for ids in map(
            torch.tensor, (d.tolist() for d in TokenSet(tmp_path).split("validation").iter_documents())
        ):
            for a in range(0, len(ids) - 1, n):
                piece = ids[a : a + n + 1]
                log_probs = model.logits(model(piece[None, :-1])).log_softmax(-1)[0]
                nll -= float(log_probs.gather(1, piece[1:, None]).sum())
                count += len(piece) - 1
    measured = Validator(wanted, ProcessGroup())(model, ProcessGroup())
    assert int(rows["loss_mask"].sum()) == count
    assert measured["held_out_nll"] == pytest.approx(nll / count, rel=1e-4)
    size = held_out_bytes_per_target(wanted, tokenizer.text_bytes(tokenizer.vocab_size)) * count
    assert size == pytest.approx(sum(len(t.encode()) for t in texts))


@pytest.mark.parametrize("replicas", [1, 2])
def test_short_texts_validate_and_keep_best_weights(replicas: int, tmp_path: Path) -> None:
    make_set(tmp_path / "set", ["xyz wv"] * 9, train=SHORT)
    wanted, notes = job(tmp_path / "set", steps=60, evaluations=12, replicas=replicas), Notes()
    pretrain(wanted, tmp_path / "a", notes)
    losses = [e["held_out_nll"] for e in notes.evaluations]
    assert len(losses) >= 12 and max(losses) > min(losses)
    assert losses[-1] == pytest.approx(min(losses), rel=2e-2)
    assert {e["kind"] for e in notes.events} <= {"overfitting"} and notes.events


def test_replicas_share_fewer_rows_than_there_are(tmp_path: Path) -> None:
    make_set(tmp_path / "set", ["ab"])
    one, two = (
        train_notes(job(tmp_path / "set", steps=4, replicas=n), tmp_path / str(n)).evaluations for n in (1, 2)
    )
    assert two[-1]["held_out_nll"] == pytest.approx(one[-1]["held_out_nll"], rel=1e-2)


def test_no_rows_without_validation_text(tmp_path: Path) -> None:
    make_set(tmp_path, [])
    assert held_out_rows(job(tmp_path)) is None and held_out_bytes_per_target(job(tmp_path), []) == 0.0
