"""Force an output to start with given bytes, in any tokens: a healed prompt (`tokens/vocabulary.py`).

    allowed(t) = t starts with the rest of the prefix, or the rest starts with t (t not empty)

The vocabulary is sorted once. Tokens that start with the rest form one range of it, found by two binary searches. Tokens
that the rest starts with are looked up by each prefix of the rest. So no step scans all token bytes.

`ForcedPrefix` is a `LogitConstraint`, as a grammar is. `Sequenced` runs two constraints one after the other: a forced
prefix, then a grammar. No token crosses the border between the two, since neither constraint covers both sides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

TokenMask = NDArray[Any]


class LogitConstraint(Protocol):
    """A constraint on the output: a state that advances with the output's ids."""

    @property
    def can_end(self) -> bool:
        """Whether the output may end here."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the output must end: only an end id is allowed, or nothing at all."""
        ...

    @property
    def failed(self) -> str | None:
        """Reason why no valid continuation exists, or None."""
        ...

    def mask(self) -> TokenMask | None:
        """Allowed next ids: [V] bool, or packed in int32 (`SamplerRow.allowed_mask`); None once everything is allowed."""
        ...

    def advance(self, token_id: int) -> None:
        """Advance by one id that the mask allows."""
        ...


class SortedVocabulary:
    """Token bytes in sorted order.

    Args:
        token_bytes: of each id; empty for control ids without text.
        vocab_size: V of the logits, if larger than len(token_bytes).
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int | None = None) -> None:
        self.token_bytes = token_bytes
        self.vocab_size = max(vocab_size or 0, len(token_bytes))
        order = sorted((text, number) for number, text in enumerate(token_bytes) if text)
        self.sorted_bytes = [text for text, _ in order]
        self.sorted_ids = np.array([number for _, number in order], np.int64)
        self.max_token_bytes = max(map(len, self.sorted_bytes), default=0)

    def ids_with_prefix(self, prefix: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that start with `prefix`, itself included: [n]."""
        start = bisect_left(self.sorted_bytes, prefix)
        stem = prefix.rstrip(b"\xff")  # the next larger stem starts the range behind them
        end = (
            bisect_left(self.sorted_bytes, stem[:-1] + bytes([stem[-1] + 1]))
            if stem
            else len(self.sorted_bytes)
        )
        return self.sorted_ids[start:end]

    def ids_of_proper_prefixes(self, text: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that `text` starts with and that are shorter than it: [n]."""
        found = []
        for length in range(1, min(self.max_token_bytes + 1, len(text))):
            start = bisect_left(self.sorted_bytes, text[:length])
            # Several ids may have the same bytes.
            while start < len(self.sorted_bytes) and self.sorted_bytes[start] == text[:length]:
                found.append(self.sorted_ids[start])
                start += 1
        return np.array(found, np.int64)

    def ids_of(self, text: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that equal `text`."""
        return self.sorted_ids[
            bisect_left(self.sorted_bytes, text) : bisect_left(self.sorted_bytes, text + b"\0")
        ]

    def encode_greedy(self, text: bytes) -> list[int]:
        """Encode `text` by the longest matching token at each position; stops at a byte that no token starts with."""
        found: list[int] = []
        while text:
            ids = self.ids_of(text) if len(text) <= self.max_token_bytes else self.sorted_ids[:0]
            if not len(ids):
                ids = self.ids_of_proper_prefixes(text)[-1:]
            if not len(ids):
                break
            found.append(int(ids[-1]))
            text = text[len(self.token_bytes[found[-1]]) :]
        return found


class ForcedPrefix:
    """The output starts with `prefix`; afterwards everything is allowed.

    Args:
        exact: a token must end where `prefix` ends.
    """

    def __init__(self, vocabulary: SortedVocabulary, prefix: bytes, exact: bool = False) -> None:
        self.vocabulary, self.prefix, self.exact = vocabulary, prefix, exact
        self.n_matched = 0  # bytes of the prefix
        self._cached_mask: tuple[int, TokenMask | None] = -1, None  # (bytes matched, mask at that point)

    @property
    def can_end(self) -> bool:
        return self.n_matched >= len(self.prefix)

    @property
    def ended(self) -> bool:
        return self.failed is not None

    @property
    def failed(self) -> str | None:
        mask = self.mask()
        rest = self.prefix[self.n_matched :]
        return None if mask is None or mask.any() else f"no token begins {rest[:20]!r}"

    def mask(self) -> TokenMask | None:
        if self.can_end:
            return None
        if self._cached_mask[0] != self.n_matched:
            rest, v = self.prefix[self.n_matched :], self.vocabulary
            allowed = np.zeros(v.vocab_size, np.bool_)
            allowed[v.ids_of_proper_prefixes(rest)] = True
            allowed[v.ids_of(rest) if self.exact else v.ids_with_prefix(rest)] = True
            self._cached_mask = self.n_matched, allowed
        return self._cached_mask[1]

    def advance(self, token_id: int) -> None:
        token_bytes = self.vocabulary.token_bytes
        length = len(token_bytes[token_id]) if token_id < len(token_bytes) else 0
        self.n_matched = min(self.n_matched + length, len(self.prefix))


class Sequenced:
    """`first`, then `second`. `first` must not allow a token that crosses its end (`exact`)."""

    def __init__(self, first: ForcedPrefix, second: LogitConstraint) -> None:
        self.first, self.second = first, second

    @property
    def can_end(self) -> bool:
        return self.first.can_end and self.second.can_end

    @property
    def ended(self) -> bool:
        return self.second.ended if self.first.can_end else self.first.ended

    @property
    def failed(self) -> str | None:
        return self.second.failed if self.first.can_end else self.first.failed

    def mask(self) -> TokenMask | None:
        return self.second.mask() if self.first.can_end else self.first.mask()

    def advance(self, token_id: int) -> None:
        (self.second if self.first.can_end else self.first).advance(token_id)
