"""Short pretraining runs: train, compare weights, write raw text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tests.support.train.tiny import Notes, doubled_letters
from whorl.models import Transformer
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain


def train(wanted: Job, scratch: Path, notes: Notes | None = None, **more: object) -> Transformer:
    return pretrain(wanted, scratch, notes or Notes(), **more)  # type: ignore[arg-type]


def train_notes(wanted: Job, scratch: Path, **more: object) -> Notes:
    """Train, and return what the run reported."""
    notes = Notes()
    train(wanted, scratch, notes, **more)
    return notes


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    """All parameters and buffers have equal bits; NaN equals NaN."""
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0, equal_nan=True)


def assert_close(a: nn.Module, b: nn.Module) -> None:
    """All parameters are equal up to the order of sums."""
    torch.testing.assert_close(weights(a), weights(b), atol=2e-4, rtol=1e-3)


def assert_resume_is_exact(wanted: Job, scratch: Path, stop: int, notes: Notes | None = None) -> Transformer:
    """Train without and with an interruption after `stop` steps, and return the model of the former."""
    whole = train(wanted, scratch / "whole", notes)
    train(wanted, scratch / "resumed", stop_after=stop, checkpoint_seconds=0.0)
    assert_equal(whole, train(wanted, scratch / "resumed"))
    return whole


def raw_text(tokens: Path, folder: Path, seed: int = 1) -> dict[str, object]:
    """A job's `stream`: a JSONL file of documents like those of the token set."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    texts = [doubled_letters(rng, "abcdefgh", 10, 90) for _ in range(80)]
    (folder / "raw.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return {"tokenizer": str(tokens), "sources": [{"files": [str(folder / "raw.jsonl")]}]}
