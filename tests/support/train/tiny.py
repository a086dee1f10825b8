"""A tiny token set and job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny import decoder_config, make_document
from whorl.models import Transformer
from whorl.tokens.shards import write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.train.job import Job


def doubled_letters(rng: np.random.Generator, alphabet: str, low: int, high: int) -> str:
    """Random letters, each letter twice: half of the letters are certain, half uniform."""
    return "".join(c + c for c in rng.choice(list(alphabet), rng.integers(low, high)))


def make_tokens(
    folder: Path,
    *,
    documents: int = 60,
    alphabet: str = "abcdefgh",
    seed: int = 0,
    replaced: Mapping[int, str] | None = None,
) -> Path:
    """Documents of doubled letters; `replaced` gives other texts to some of them."""
    rng = np.random.default_rng(seed)
    texts = {i: doubled_letters(rng, alphabet, 40, 400) for i in range(documents)} | dict(replaced or {})
    made = [make_document(text, i) for i, text in texts.items()]
    tokenizer = Tokenizer.train(["zz"], 300)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    write_shards(made[5:], tokenizer, folder, "train")
    write_shards(made[:5], tokenizer, folder, "validation")
    return folder


def job(tokens: Path, **change: object) -> Job:
    model = decoder_config(vocab_size=300, ngram_buckets=256)
    base = {"tokens": str(tokens), "model": model, "seq_len": 32, "batch_size": 8, "steps": 12, "compile": False,
            "evaluations": 3, "serial_loader": True}  # fmt: skip
    return Job.model_validate({**base, **change})


class Notes:
    """A callback that stores its calls."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.checkpoints: list[int] = []
        self.events: list[dict[str, Any]] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def on_evaluation(self, step: int, metrics: dict[str, float], model: Transformer) -> None:
        self.evaluations.append(metrics)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self.checkpoints.append(step)

    def on_event(self, step: int, event: dict[str, Any]) -> None:
        self.events.append(event)
