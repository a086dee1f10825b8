"""Inputs of the golden cases: tiny models, texts. If one changes, every hash changes.

The token set, the decoder and the byte tokenizer are those of `tests/support`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.support.tiny import make_byte_tokenizer, make_decoder
from tests.support.train.model_shapes import EXPERTS

from whorl.models import Transformer
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample

HEADS = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16}
# Changes to `TransformerConfig`; None is the project's own decoder.
SHAPES: dict[str, dict[str, Any] | None] = {
    "decoder": None, "llama": {"mixers": {"m": HEADS}}, "mamba": {"mixers": {"m": {"kind": "mamba"}}},
    "experts": {"mixers": {"m": HEADS}, "experts": EXPERTS},
}  # fmt: skip


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder that is removed afterwards."""
    with TemporaryDirectory(prefix="golden-") as folder:
        yield Path(folder)


@cache
def scribe() -> TokenEncoder:
    """The encoder of prompts and answers."""
    return TokenEncoder(make_byte_tokenizer())


def decoder(seed: int = 0) -> Transformer:
    """A decoder over bytes whose outputs differ from uniform: its head is 20 times as large."""
    model = make_decoder(seed)
    with torch.no_grad():
        model.head_weight.mul_(20)
    return model


def sums(n: int) -> list[TokenizedExample]:
    """Texts `a+b=c`, of which c and the end are trained on."""
    pairs = torch.randint(0, 50, (n, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return [scribe().prompt_completion(f"{a}+{b}=", str(a + b)) for a, b in pairs]
