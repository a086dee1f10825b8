"""Short pretraining runs: train, read the weights, compare them, write raw text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from tests.support.train.tiny import Notes
from whorl.models import Decoder
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain


def train(wanted: Job, scratch: Path, notes: Notes | None = None, **more: object) -> Decoder:
    return pretrain(wanted, scratch, notes or Notes(), **more)  # type: ignore[arg-type]


def weights(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def raw_text(tokens: Path, folder: Path, seed: int = 1) -> dict[str, object]:
    """A job's `stream`: a JSONL file of documents like those of the token set."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    texts = ["".join(c + c for c in rng.choice(list("abcdefgh"), rng.integers(10, 90))) for _ in range(80)]
    (folder / "raw.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return {"tokenizer": str(tokens), "sources": [{"files": [str(folder / "raw.jsonl")]}]}
