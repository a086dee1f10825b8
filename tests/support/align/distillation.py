"""A tiny student, its teacher and texts for the distillation tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.align.byte_model import BANNED, VOCAB, scribe, target_log_probs
from tests.support.align.kill_at_step import History, record
from tests.support.configs import nested
from whorl.align.config import DistilConfig
from whorl.align.distillation.teacher import LiveTeacher
from whorl.align.distillation.train import train_student
from whorl.align.model.policy_model import PolicyModel
from whorl.models import LanguageModel, make_model, whorl_decoder
from whorl.objectives.distil import divergence
from whorl.tokens.token_encoder import TokenizedExample
from whorl.tracking.seeds import generator

SCRIBE = scribe()
TOKENIZER = SCRIBE.tokenizer
PAD = TOKENIZER.pad_id


def model_of(seed: int, width: int = 16, layers: int = 1) -> LanguageModel:
    config = whorl_decoder(
        vocab_size=VOCAB, d_model=width, n_layers=layers, n_heads=2, n_kv_heads=2, head_dim=8, mlp_hidden=2 * width,
        ngram_orders=(2,), ngram_buckets=64,
    )  # fmt: skip
    model = make_model(config, generator(seed, "test"))
    noise = generator(seed, "noise")
    with torch.no_grad():  # layers start as zero, and the head almost uniform
        assert model.head is not None
        model.head.mul_(20)
        for p in model.blocks.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=noise))
    return model


def network_of(seed: int = 1) -> PolicyModel:
    return PolicyModel(model_of(seed), banned_ids=BANNED)


def some_texts(n: int = 24) -> list[TokenizedExample]:
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdef"), rng.integers(2, 9))) for _ in range(2 * n)]
    return [SCRIBE.prompt_completion(a, b) for a, b in zip(words[::2], words[1::2], strict=True)]


def config_of(**options: Any) -> DistilConfig:
    usual = {"lr_scale": 0.5, "epochs": 2.0, "batch_size": 8, "seq_len": 24, "max_completion_tokens": 8}
    return DistilConfig.model_validate(nested(**{**usual, "dtype": "float32", **options}))


def learn(
    network: PolicyModel, teacher: Any, texts: list[TokenizedExample], *,
    kill: int = 0, checkpoint_dir: Path | None = None, log: Any = lambda text: None, **config: Any,
) -> History:  # fmt: skip
    """Train a student with `config_of(**config)`; return the metrics of each step.

    teacher: a model stands for its `LiveTeacher`. kill: as in `record`.
    """
    history, callback = record(kill)
    live = LiveTeacher(teacher) if isinstance(teacher, torch.nn.Module) else teacher
    train_student(
        network, live, texts, config_of(**config), encoder=SCRIBE, pad_id=PAD,
        callback=callback, checkpoint_dir=checkpoint_dir, log=log,
    )  # fmt: skip
    return history


@torch.no_grad()
def mean_divergence(
    student: LanguageModel, teacher: LanguageModel, texts: list[TokenizedExample], kind: Any
) -> float:
    """Return the mean divergence by its definition, text by text."""
    each = [divergence(target_log_probs(teacher, t), target_log_probs(student, t), kind) for t in texts]
    return float(torch.cat(each).mean())
