"""The base of Whorl's and Hugging Face's tokenizers: bytes of ids, ids that are never sampled, token healing.

Token healing is about the border between a prompt and the generated text. A prompt ends where the user stopped typing, not
at the end of a token. "def f():" + newline ends in a single newline token. In training, the newline was merged with the
indentation after it; alone it occurred only at the ends of files, so the model predicts the end of the file. So the end of
the prompt is removed, and generation is forced to start with its bytes, in any tokens. The end is the last pre-token, or its
last token alone if the pre-token is longer than `MAX_HEALED_BYTES`. An end that is still longer is not healed: each healed
byte may cost a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError

MAX_HEALED_BYTES = 16


class HealedPrompt(NamedTuple):
    """ids: bos and the text without its end. forced_prefix: bytes of the end, with which generation starts.

    n_tokens: ids of the whole prompt, its end included.
    """

    ids: list[int]
    forced_prefix: bytes
    n_tokens: int


class Vocabulary(ABC):
    """token_bytes: of each id. control_ids: those that must not be sampled; ids of an imported tokenizer may lie behind
    the model's rows. end_ids: those that end a text. vocab_size: number of ids.
    """

    token_bytes: Any
    vocab_size: Any
    control_ids: Any
    end_ids: Any

    def banned_ids(self, n_rows: int, keep: Collection[int] = ()) -> list[int]:
        """Return the ids that a model never samples, in order.

        Args:
            n_rows: rows of the model's output matrix; those after the vocabulary only pad it.
            keep: ids that are sampled although they are control ids, such as the end of a turn.
        """
        silent = {i for i in self.control_ids if i < n_rows}
        return sorted(silent.union(range(self.vocab_size, n_rows)).difference(keep))

    def text_bytes(self, n_rows: int) -> list[bytes]:
        """Return the bytes of each of `n_rows` ids as a model's text; b"" for special tokens and padding rows."""
        spelled = self.token_bytes[: min(n_rows, self.n_spelled)]
        return [*spelled, *[b""] * (n_rows - len(spelled))]

    @property
    def n_spelled(self) -> int:
        """Ids from here on are special tokens, whose `token_bytes` are no text."""
        return len(self.token_bytes)

    @abstractmethod
    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text to continue, with the prefix of training, such as bos."""

    @abstractmethod
    def heal_prompt(self, text: str) -> HealedPrompt:
        """Return a prompt ready for generation: the ids of `encode_prompt` without the end of the text."""


def without_last_token(ids: list[int], token_bytes: Sequence[bytes]) -> HealedPrompt:
    """Heal the last token of `ids`, if it is at most `MAX_HEALED_BYTES` long."""
    last = token_bytes[ids[-1]]
    if len(last) > MAX_HEALED_BYTES:
        return HealedPrompt(ids, b"", len(ids))
    return HealedPrompt(ids[:-1], last, len(ids))


def join_tokens(ids: Iterable[int] | NDArray[Any], token_bytes: Sequence[bytes]) -> bytes:
    """Return the bytes of `ids`, from a table of all ids.

    Raises:
        DataError: an id outside the table.
    """
    listed: list[int] = np.asarray(ids).tolist() if isinstance(ids, np.ndarray) else [int(i) for i in ids]
    for i in listed:
        if not 0 <= i < len(token_bytes):
            raise DataError(
                f"token id {i} is outside the vocabulary", expected=f"0 to {len(token_bytes) - 1}"
            )
    return b"".join([token_bytes[i] for i in listed])
