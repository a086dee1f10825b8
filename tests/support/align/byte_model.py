"""A byte tokenizer, a small decoder, and texts of sums for the alignment tests."""

from __future__ import annotations

from pathlib import Path

import torch

from whorl.align.model.example import ExampleTokenizer, TokenizedExample
from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.sampling import banned_ids
from whorl.models import Decoder, DecoderConfig
from whorl.tokens.tokenizer import Tokenizer

VOCAB = 264


def tokenizer(folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer of 256 bytes and the special tokens; saved into `folder`."""
    made = Tokenizer([bytes([i]) for i in range(256)])
    if folder is not None:
        made.save(folder)
    return made


def scribe() -> ExampleTokenizer:
    return ExampleTokenizer(tokenizer())


def decoder(d_model: int = 32, n_layers: int = 2, seed: int = 0) -> Decoder:
    """Return a decoder with random weights, including zero-initialized ones."""
    config = DecoderConfig(
        vocab_size=VOCAB, d_model=d_model, n_layers=n_layers, mlp_hidden=2 * d_model,
        n_heads=2, n_kv_heads=1, head_dim=16, ngram_buckets=64,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    model = Decoder(config, draw)
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(0.0, 0.3 * p.shape[-1] ** -0.5, generator=draw)
    return model


def network(**options: object) -> PolicyModel:
    """Return a policy of that decoder."""
    made = scribe()
    out = banned_ids(made, VOCAB, len(made.tokenizer.token_bytes))
    return PolicyModel(decoder(), banned_ids=out, **options)  # type: ignore[arg-type]


def sums(n: int, seed: int = 0) -> list[TokenizedExample]:
    """Return texts `a+b=c` with c and the end in the loss."""
    draw = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 50, (n, 2), generator=draw).tolist()
    writer = scribe()
    return [writer.prompt_completion(f"{a}+{b}=", str(a + b)) for a, b in pairs]
