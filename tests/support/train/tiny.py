"""A tiny token set and job."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whorl.models import Decoder, DecoderConfig
from whorl.tokens.shards import TokensConfig, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress
from whorl.train.job import Job


class Document(NamedTuple):
    id: str
    source: str
    path: str
    offset: int
    text: str

    @property
    def n_bytes(self) -> int:
        return len(self.text.encode())


def make_tokens(folder: Path, *, documents: int = 60, alphabet: str = "abcdefgh", seed: int = 0) -> Path:
    """Documents of random letters, each letter twice: half of the letters are certain, half uniform."""
    rng = np.random.default_rng(seed)
    texts = [
        "".join(c + c for c in rng.choice(list(alphabet), rng.integers(40, 400))) for _ in range(documents)
    ]
    made = [Document(str(i), "test", f"{i}.txt", 0, text) for i, text in enumerate(texts)]
    tokenizer = Tokenizer.train(["zz"], 300)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    for split, part in (("train", made[5:]), ("validation", made[:5])):
        size = sum(d.n_bytes for d in part)
        write_shards(part, tokenizer, folder, split, TokensConfig(), Progress.silent(), size)  # type: ignore[arg-type]
    return folder


def job(tokens: Path, **change: object) -> Job:
    model = DecoderConfig(
        vocab_size=300,
        d_model=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        mlp_hidden=64,
        ngram_buckets=256,
    )
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

    def on_evaluation(self, step: int, metrics: dict[str, float], model: Decoder) -> None:
        self.evaluations.append(metrics)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self.checkpoints.append(step)

    def on_event(self, step: int, event: dict[str, Any]) -> None:
        self.events.append(event)
