"""A byte tokenizer, a small decoder, and texts of sums for the alignment tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.tiny import BYTE_VOCAB, make_byte_tokenizer, make_decoder
from whorl.align.model.policy_model import PolicyModel
from whorl.models import LanguageModel, Transformer
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample
from whorl.tokens.tokenizer import Tokenizer

VOCAB = BYTE_VOCAB


def tokenizer(folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer of 256 bytes and the special tokens; saved into `folder`."""
    made = make_byte_tokenizer()
    if folder is not None:
        made.save(folder)
    return made


@functools.cache
def scribe() -> TokenEncoder:
    return TokenEncoder(tokenizer())


BANNED = scribe().banned_ids(VOCAB)


def decoder(d_model: int = 32, n_layers: int = 2, seed: int = 0) -> Transformer:
    """Return a decoder with random weights, including zero-initialized ones."""
    return make_decoder(seed, d_model=d_model, n_layers=n_layers, mlp_hidden=2 * d_model)


def network(**options: Any) -> PolicyModel:
    """Return a policy of that decoder."""
    return PolicyModel(decoder(), banned_ids=BANNED, **options)


def sums(n: int, seed: int = 0) -> list[TokenizedExample]:
    """Return texts `a+b=c` with c and the end in the loss."""
    draw = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 50, (n, 2), generator=draw).tolist()
    writer = scribe()
    return [writer.prompt_completion(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def target_log_probs(
    model: LanguageModel, text: TokenizedExample, temperature: float = 1.0, banned: Sequence[int] = ()
) -> Tensor:
    """Return all log-probabilities at the targets of a text, [targets, vocabulary]."""
    logits = model.logits(model(torch.from_numpy(text.ids)[None, :-1]))[0] / temperature
    logits[:, list(banned)] = -torch.inf
    return logits.log_softmax(-1)[torch.from_numpy(text.loss_mask[1:])]
