"""Inputs of the golden cases: a token set, tiny models, texts. If one changes, every hash changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from whorl.align.model.example import ExampleTokenizer, TokenizedExample
from whorl.models import Decoder, DecoderConfig
from whorl.tokens.shards import TokensConfig, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress

BYTES_VOCAB = 264  # 256 bytes, three special tokens, rounded up

HEADS = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16}
EXPERTS = {"n_experts": 4, "top_k": 2, "hidden": 32, "bias_balance": True, "scoring": "sigmoid"}
# Changes to `TransformerConfig`; None is the project's own decoder.
SHAPES: dict[str, dict[str, Any] | None] = {
    "decoder": None,
    "llama": {"mixers": {"m": HEADS}},
    "mamba": {"mixers": {"m": {"kind": "mamba"}}},
    "experts": {"mixers": {"m": HEADS}, "experts": EXPERTS},
}


class Document(NamedTuple):
    """A document as the corpus yields it."""

    id: str
    source: str
    path: str
    offset: int
    text: str

    @property
    def n_bytes(self) -> int:
        return len(self.text.encode())


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder that is removed afterwards."""
    with TemporaryDirectory(prefix="golden-") as folder:
        yield Path(folder)


def make_tokens(folder: Path) -> Path:
    """Write a token set of random letters, each letter twice: half of the letters are certain, half are uniform."""
    rng = np.random.default_rng(0)
    texts = ["".join(c + c for c in rng.choice(list("abcdefgh"), rng.integers(40, 400))) for _ in range(60)]
    made = [Document(str(i), "test", f"{i}.txt", 0, text) for i, text in enumerate(texts)]
    tokenizer = Tokenizer.train(["zz"], 300)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    for split, part in (("train", made[5:]), ("validation", made[:5])):
        size = sum(d.n_bytes for d in part)
        write_shards(part, tokenizer, folder, split, TokensConfig(), Progress.silent(), size)  # type: ignore[arg-type]
    return folder


def bytes_tokenizer(folder: Path | None = None) -> Tokenizer:
    """A tokenizer of the 256 bytes and the special tokens, saved into `folder` if one is given."""
    made = Tokenizer([bytes([i]) for i in range(256)])
    if folder is not None:
        made.save(folder)
    return made


@cache
def scribe() -> ExampleTokenizer:
    """The encoder of prompts and answers."""
    return ExampleTokenizer(bytes_tokenizer())


def decoder(n_layers: int = 2, seed: int = 0) -> Decoder:
    """A decoder over bytes whose outputs differ from uniform: zeros are drawn, and the head is 20 times as large."""
    config = DecoderConfig(
        vocab_size=BYTES_VOCAB, d_model=32, n_layers=n_layers, mlp_hidden=64, ngram_buckets=64, **HEADS
    )
    draw = torch.Generator().manual_seed(seed)
    model = Decoder(config, draw)
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(0.0, 0.3 * p.shape[-1] ** -0.5, generator=draw)
        model.head_weight.mul_(20)
    return model


def sums(n: int) -> list[TokenizedExample]:
    """Texts `a+b=c`, of which c and the end are trained on."""
    pairs = torch.randint(0, 50, (n, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return [scribe().prompt_completion(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def disturbed(model: nn.Module, scale: float = 0.15) -> nn.Module:
    """The model with noise on every parameter, in evaluation mode."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=draw) * scale)
    return model.eval()
