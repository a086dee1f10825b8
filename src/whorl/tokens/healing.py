"""Token healing: the border between a prompt and the generated text.

A prompt ends where the user stopped typing, not at the end of a token. "def f():" + newline ends in a single newline token.
In training, the newline was merged with the indentation after it; alone it occurred only at the ends of files, so the model
predicts the end of the file. So the last pre-token of the prompt is removed, and generation is forced to start with its
bytes, in any tokens. No token crosses the border before it.
"""

from __future__ import annotations

from typing import NamedTuple

from whorl.tokens.pretokens import split_pretokens
from whorl.tokens.tokenizer import Tokenizer


class HealedPrompt(NamedTuple):
    """ids: bos and the text up to the last pre-token. forced_prefix: bytes that generation starts with."""

    ids: list[int]
    forced_prefix: bytes


def heal(tokenizer: Tokenizer, text: str) -> HealedPrompt:
    """Return a prompt ready for generation."""
    last = split_pretokens(text)[-1] if text else ""
    head = text[: len(text) - len(last)]
    return HealedPrompt([tokenizer.bos_id, *tokenizer.encode(head).tolist()], last.encode())
