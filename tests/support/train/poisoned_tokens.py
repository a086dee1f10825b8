"""A token set with one document that causes NaN, and a job that trains on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.support.train.tiny import Document, job
from whorl.tokens.shards import TokensConfig, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.job import Job, identity
from whorl.train.lm.pretrain import allocate_shared, build_model

BAD = 17  # only this document contains the letter x


def make_poisoned(folder: Path, *, letters: int = 400) -> Path:
    """Like `tiny.make_tokens`; a longer bad document is in more batches."""
    rng = np.random.default_rng(0)
    texts = ["".join(c + c for c in rng.choice(list("abcd"), rng.integers(40, 400))) for _ in range(60)]
    texts[BAD] = "x" * letters
    made = [Document(f"id-{i}", "test", f"{i}.txt", 0, text) for i, text in enumerate(texts)]
    tokenizer = Tokenizer.train(["zz"], 300)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    for split, part in (("train", made[5:]), ("validation", made[:5])):
        write_shards(part, tokenizer, folder, split, TokensConfig(), Progress.silent(), 1)  # type: ignore[arg-type]
    return folder


def poisoned(tokens: Path, scratch: Path, *, ids: slice | int = 120, **change: object) -> Job:
    """Return a job whose checkpoint of step 0 in `scratch` has NaN embeddings for `ids`."""
    watch = {"max_skipped": 1.0, "patience": 1000}
    wanted = job(tokens, **{"steps": 48, "spike_guard": watch, **change})
    shared = allocate_shared(build_model(wanted), wanted)
    shared.weights["embedding"][ids] = torch.nan
    with CheckpointManager(scratch, identity(wanted), thread=True) as keeper:
        keeper.save(0, shared.tensors())
    return wanted
