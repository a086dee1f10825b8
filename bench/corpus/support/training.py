"""Short training of a small model, on a token set that a bench wrote."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench._run import sized
from bench.plan.scaling_sweep import SilentCallback

from whorl.corpus import Document
from whorl.machine.device_probe import probe
from whorl.plan.accounting.model_cost import decoder_config
from whorl.tokens.shards import TokensConfig, TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain

WIDTH, DEPTH, VOCABULARY, BATCH, LENGTH = sized((128, 3, 2048, 8, 512), (64, 2, 320, 2, 64))


def write_tokens(
    tokenizer: Tokenizer, folder: Path, train: Iterable[Document], validation: Iterable[Document]
) -> TokenSet:
    """Write and return a token set."""
    folder.mkdir()
    tokenizer.save(folder)
    for split, documents in (("train", train), ("validation", validation)):
        write_shards(documents, tokenizer, folder, split, TokensConfig(), Progress.silent())
    return TokenSet(folder)


def trained(tokens: Path, seed: int, steps: int) -> tuple[Any, float]:
    """Return a model after `steps` steps of BATCH x LENGTH tokens, and the seconds."""
    machine = probe()
    job = Job(
        tokens=str(tokens), model=decoder_config(WIDTH, DEPTH, VOCABULARY), seq_len=LENGTH, batch_size=BATCH, steps=steps,
        seed=seed, replicas=1, threads=machine.cores, dtype=machine.dtype, device=machine.device, compile=False,
        evaluations=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        model = pretrain(job, Path(scratch), SilentCallback(), checkpoint_seconds=1e9)
        return model.eval(), time.monotonic() - began
