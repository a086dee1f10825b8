"""Healing the border between a prompt and what is generated.

A prompt is cut where a person stopped typing, not where a token ends. "def f():" + newline ends in a lone newline token, but
in training the newline was merged with the indentation behind it, and stood alone only at the ends of files: the model,
rightly, expects the file to end. So the last pre-token of the prompt is taken back, and generation must begin by writing
its bytes again, with whatever tokens it likes (known as token healing). Before it lies a border that no token crosses.
"""

from __future__ import annotations

from typing import NamedTuple

from whorl.tokens.pretokens import split_pretokens
from whorl.tokens.tokenizer import Tokenizer


class HealedPrompt(NamedTuple):
    """ids: bos and the text up to the last pre-token; required: the bytes that generation begins with."""

    ids: list[int]
    forced_prefix: bytes


def heal(tokenizer: Tokenizer, text: str) -> HealedPrompt:
    """A prompt ready for generation."""
    last = split_pretokens(text)[-1] if text else ""
    kept = text[: len(text) - len(last)]
    return HealedPrompt([tokenizer.bos_id, *tokenizer.encode(kept).tolist()], last.encode())
