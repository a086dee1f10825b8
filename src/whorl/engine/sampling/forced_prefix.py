"""Bytes that an output must begin with, in tokens of the model's choice: a healed prompt (`tokens/healing.py`).

    fits(t) = t begins with the rest of the required bytes, or the rest begins with t (t not empty)

The vocabulary is put in order once: those that begin with the rest are then one stretch of it, found by two searches, and
those that the rest begins with are looked up by each of its beginnings. No step looks at all token bytes.

`Required` is a `Matcher`, as a grammar is: what may come next, one id on, some ids back. `Then` writes one after another, a
required beginning and behind it a sentence of a grammar; no token crosses the border between the two, since neither side
could judge it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[Any]


class Matcher(Protocol):
    """What an output may be: a state that moves with the output's ids."""

    @property
    def can_end(self) -> bool:
        """Whether the output may end here."""
        ...

    @property
    def ended(self) -> bool:
        """Whether it must: nothing but an end id is allowed, or nothing at all."""
        ...

    @property
    def failed(self) -> str | None:
        """Why it can neither go on nor end as it should; None while it can."""
        ...

    def mask(self) -> Mask | None:
        """Ids that may come next: [V] bool, or packed in int32 (see `Row.allowed`); None if all may, from here on."""
        ...

    def advance(self, number: int) -> None:
        """Takes in one id that the mask allows."""
        ...

    def rollback(self, count: int) -> None:
        """Takes back the last `count` ids."""
        ...

    def copy(self) -> Self:
        """Another one in the same state."""
        ...


class Vocabulary:
    """Token bytes in order.

    Args:
        token_bytes: of each id; empty for one that writes nothing (an id of control).
        size: V of the logits, if there are more ids than have bytes.
    """

    def __init__(self, token_bytes: Sequence[bytes], size: int | None = None) -> None:
        self.token_bytes = token_bytes
        self.size = max(size or 0, len(token_bytes))
        order = sorted((text, number) for number, text in enumerate(token_bytes) if text)
        self.texts = [text for text, _ in order]
        self.ids = np.array([number for _, number in order], np.int64)
        self.longest = max(map(len, self.texts), default=0)

    def beginning_with(self, text: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that begin with `text`, itself among them: [n]."""
        start = bisect_left(self.texts, text)
        stem = text.rstrip(b"\xff")  # the texts behind them begin with the next larger stem
        end = bisect_left(self.texts, stem[:-1] + bytes([stem[-1] + 1])) if stem else len(self.texts)
        return self.ids[start:end]

    def beginnings_of(self, text: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that `text` begins with, but is longer than: [n]."""
        found = []
        for length in range(1, min(self.longest + 1, len(text))):
            start = bisect_left(self.texts, text[:length])
            while (
                start < len(self.texts) and self.texts[start] == text[:length]
            ):  # several ids may share a text
                found.append(self.ids[start])
                start += 1
        return np.array(found, np.int64)

    def same_as(self, text: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that are `text`."""
        return self.ids[bisect_left(self.texts, text) : bisect_left(self.texts, text + b"\0")]

    def spelled(self, text: bytes) -> list[int]:
        """Ids whose tokens write `text`, each the longest that fits; it ends before a byte that no token begins with."""
        found: list[int] = []
        while text:
            ids = self.same_as(text) if len(text) <= self.longest else self.ids[:0]
            if not len(ids):
                ids = self.beginnings_of(text)[-1:]
            if not len(ids):
                break
            found.append(int(ids[-1]))
            text = text[len(self.token_bytes[found[-1]]) :]
        return found


class Required:
    """The output begins with `text`; behind it everything is allowed.

    Args:
        exact: a token ends where `text` does.
    """

    def __init__(self, vocabulary: Vocabulary, text: bytes, exact: bool = False) -> None:
        self.vocabulary, self.text, self.exact = vocabulary, text, exact
        self.written = [0]  # bytes of it, after each id
        self._known: tuple[int, Mask | None] = -1, None  # bytes written, and the mask there

    @property
    def can_end(self) -> bool:
        return self.written[-1] >= len(self.text)

    @property
    def ended(self) -> bool:
        return self.failed is not None

    @property
    def failed(self) -> str | None:
        mask = self.mask()
        rest = self.text[self.written[-1] :]
        return None if mask is None or mask.any() else f"no token begins {rest[:20]!r}"

    def mask(self) -> Mask | None:
        if self.can_end:
            return None
        if self._known[0] != self.written[-1]:
            rest, v = self.text[self.written[-1] :], self.vocabulary
            allowed = np.zeros(v.size, np.bool_)
            allowed[v.beginnings_of(rest)] = True
            allowed[v.same_as(rest) if self.exact else v.beginning_with(rest)] = True
            self._known = self.written[-1], allowed
        return self._known[1]

    def advance(self, number: int) -> None:
        known = self.vocabulary.token_bytes
        length = len(known[number]) if number < len(known) else 0
        self.written.append(min(self.written[-1] + length, len(self.text)))

    def rollback(self, count: int) -> None:
        if count:
            del self.written[-count:]

    def copy(self) -> Required:
        twin = Required(self.vocabulary, self.text, self.exact)
        twin.written = list(self.written)
        return twin


class Then:
    """`first`, and when it is through, `second`. `first` must allow no token that goes beyond it (`exact`)."""

    def __init__(self, first: Required, second: Matcher) -> None:
        self.first, self.second = first, second
        self.taken = 0  # ids that went to the second

    @property
    def can_end(self) -> bool:
        return self.first.can_end and self.second.can_end

    @property
    def ended(self) -> bool:
        return self.second.ended if self.first.can_end else self.first.ended

    @property
    def failed(self) -> str | None:
        return self.second.failed if self.first.can_end else self.first.failed

    def mask(self) -> Mask | None:
        return self.second.mask() if self.first.can_end else self.first.mask()

    def advance(self, number: int) -> None:
        if self.first.can_end:
            self.second.advance(number)
            self.taken += 1
        else:
            self.first.advance(number)

    def rollback(self, count: int) -> None:
        back = min(count, self.taken)
        self.second.rollback(back)
        self.taken -= back
        self.first.rollback(count - back)

    def copy(self) -> Then:
        twin = Then(self.first.copy(), self.second.copy())
        twin.taken = self.taken
        return twin
