"""Token healing: the border between a prompt and the generated text.

A prompt ends where the user stopped typing, not at the end of a token. "def f():" + newline ends in a single newline token.
In training, the newline was merged with the indentation after it; alone it occurred only at the ends of files, so the model
predicts the end of the file. So the end of the prompt is removed, and generation is forced to start with its bytes, in any
tokens. The end is the last pre-token, or its last token alone if the pre-token is longer than `MAX_HEALED_BYTES`. An end
that is still longer is not healed: each healed byte may cost a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from whorl.tokens.pretokens import last_pretoken
from whorl.tokens.tokenizer import Tokenizer

MAX_HEALED_BYTES = 16


class HealedPrompt(NamedTuple):
    """ids: bos and the text without its end. forced_prefix: bytes of the end, with which generation starts.

    n_tokens: ids of the whole prompt, its end included.
    """

    ids: list[int]
    forced_prefix: bytes
    n_tokens: int


def heal(tokenizer: Tokenizer, text: str) -> HealedPrompt:
    """Return a prompt ready for generation."""
    last = last_pretoken(text, tokenizer.pattern)
    ids = tokenizer.encode_to_list(text[: len(text) - len(last)])
    ids.insert(0, tokenizer.bos_id)
    end = tokenizer.encode_to_list(last)
    if len(last.encode()) <= MAX_HEALED_BYTES:
        return HealedPrompt(ids, last.encode(), len(ids) + len(end))
    return without_last_token(ids + end, tokenizer.token_bytes)


def without_last_token(ids: list[int], token_bytes: Sequence[bytes]) -> HealedPrompt:
    """Heal the last token of `ids`, if it is at most `MAX_HEALED_BYTES` long."""
    last = token_bytes[ids[-1]]
    if len(last) > MAX_HEALED_BYTES:
        return HealedPrompt(ids, b"", len(ids))
    return HealedPrompt(ids[:-1], last, len(ids))
