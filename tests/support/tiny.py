"""Tiny models, a byte tokenizer and token shards that tests of every room share (see `tests/conftest.py`)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from whorl.corpus.documents import Document, document_id
from whorl.models import whorl_decoder
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig
from whorl.tokens.shards import write_shards
from whorl.tokens.tokenizer import Tokenizer

Model = TypeVar("Model", bound=torch.nn.Module)
BYTE_VOCAB = 264  # 256 bytes and 3 special tokens, padded to a multiple of 8


def decoder_config(**changes: Any) -> TransformerConfig:
    """The shape of `tiny_decoder`: 2 layers of width 32 over the byte vocabulary."""
    heads = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16}
    shape: dict[str, Any] = {"vocab_size": BYTE_VOCAB, "d_model": 32, "n_layers": 2, "mlp_hidden": 64}
    return whorl_decoder(**{**heads, **shape, "ngram_buckets": 64, **changes})


def transformer_config(**changes: Any) -> TransformerConfig:
    """The shape of `tiny_transformer`: 2 layers of width 32 with rotary attention over the byte vocabulary."""
    heads = AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=16)
    shape: dict[str, Any] = {"vocab_size": BYTE_VOCAB, "d_model": 32, "n_layers": 2, "mlp_hidden": 64}
    return TransformerConfig(**{**shape, "max_length": 64, "mixers": {"full": heads}, **changes})


def make_decoder(seed: int = 0, **changes: Any) -> Transformer:
    """The network of `decoder_config(**changes)`; parameters that start at zero are drawn, so that outputs vary."""
    generator = torch.Generator().manual_seed(seed)
    return draw_zero_parameters(Transformer(decoder_config(**changes), generator), generator)


def make_transformer(seed: int = 0, **changes: Any) -> Transformer:
    """A `Transformer` of `transformer_config(**changes)`; parameters that start at zero are drawn."""
    generator = torch.Generator().manual_seed(seed)
    return draw_zero_parameters(Transformer(transformer_config(**changes), generator), generator)


@torch.no_grad()
def draw_zero_parameters(model: Model, generator: torch.Generator) -> Model:
    """Draw all-zero parameters from N(0, 0.3² / fan_in), and return the model."""
    for p in model.parameters():
        if not p.any():
            p.normal_(0.0, 0.3 * p.shape[-1] ** -0.5, generator=generator)
    return model


@functools.cache
def make_byte_tokenizer() -> Tokenizer:
    """256 single bytes and the special tokens; one object, which nothing changes."""
    return Tokenizer([bytes([i]) for i in range(256)])


def make_document(text: str, index: int = 0, source: str = "test") -> Document:
    """One document of `source`, in the file `{index}.txt`."""
    path = f"{index}.txt"
    return Document(document_id(source, path, 0), source, path, None, 0, text, len(text.encode()), None)


def write_token_shards(folder: Path, tokenizer: Tokenizer, *, documents: int = 60, seed: int = 0) -> Path:
    """Write shards of random doubled letters ("ccaabb"): every second letter is certain, the others are uniform.

    The first 5 documents are the `validation` split, the others `train`. `folder` also gets the tokenizer's files.
    """
    rng = np.random.default_rng(seed)
    texts = [rng.choice(list("abcdefgh"), rng.integers(40, 400)) for _ in range(documents)]
    made = [make_document("".join(np.repeat(text, 2)), i) for i, text in enumerate(texts)]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    write_shards(made[5:], tokenizer, folder, "train")
    write_shards(made[:5], tokenizer, folder, "validation")
    return folder
