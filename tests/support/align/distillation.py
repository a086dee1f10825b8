"""A tiny student, its teacher and texts for the distillation tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from whorl.align.config import DistilConfig
from whorl.align.distillation.train import train_student
from whorl.align.model.example import ExampleTokenizer, TokenizedExample
from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.sampling import banned_ids
from whorl.models import DecoderConfig, LanguageModel, make_model
from whorl.objectives.distil import divergence
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator

TOKENIZER = Tokenizer([bytes([i]) for i in range(256)])
SCRIBE = ExampleTokenizer(TOKENIZER)
VOCAB = 264


def model_of(seed: int, width: int = 16, layers: int = 1) -> LanguageModel:
    config = DecoderConfig(
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
    return PolicyModel(model_of(seed), banned_ids=banned_ids(SCRIBE, VOCAB, len(TOKENIZER.token_bytes)))


def some_texts(n: int = 24) -> list[TokenizedExample]:
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdef"), rng.integers(2, 9))) for _ in range(2 * n)]
    return [SCRIBE.prompt_completion(a, b) for a, b in zip(words[::2], words[1::2], strict=True)]


def config_of(**options: Any) -> DistilConfig:
    usual: dict[str, Any] = {
        "lr_scale": 0.5, "epochs": 2.0, "batch_size": 8, "seq_len": 24, "max_completion_tokens": 8, "dtype": "float32",
    }  # fmt: skip
    return DistilConfig(**{**usual, **options})


def learn(
    network: PolicyModel, teacher: Any, texts: list[TokenizedExample], config: DistilConfig, **options: Any
) -> list[Any]:
    history: list[Any] = []
    train_student(
        network, teacher, texts, config, example_tokenizer=SCRIBE, pad_id=TOKENIZER.pad_id,
        callback=lambda step, metrics: history.append(metrics), **options,
    )  # fmt: skip
    return history


def mean_divergence(
    student: LanguageModel, teacher: LanguageModel, texts: list[TokenizedExample], kind: Any
) -> float:
    """Return the mean divergence by its definition, text by text."""
    total, count = 0.0, 0
    with torch.no_grad():
        for text in texts:
            ids = torch.from_numpy(text.ids)[None, :-1]
            p, q = (m.logits(m(ids)).log_softmax(-1)[0] for m in (teacher, student))
            kept = torch.from_numpy(text.loss_mask[1:])
            total += float(divergence(p[kept], q[kept], kind).sum())
            count += int(kept.sum())
    return total / count
