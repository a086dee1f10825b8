"""Stop texts in a stream of tokens: what may be shown, what is held back, and when it is over.

A stop text may straddle tokens, so the end of what has come is held back for as long as it may be the beginning of one.
Everything is bytes: a token may end inside a character, and so may the match.

Of several stop texts the one that is complete first ends the stream, and of those that are complete with the same byte the
one that began first. Read like this the result depends on the bytes alone, not on how they were cut into tokens, and is what
somebody who looks at the stream byte by byte would do ("abcd" and "bc" in "abcd": it is over at "abc", and "a" was shown).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringChecker:
    """Holds back what may begin a stop text.

    met: the stop text that ended the stream, or None; left_out: that text, and what followed it in the same piece.

    Args:
        texts: none empty (an empty one would end everything; `Request` refuses it).
    """

    def __init__(self, stop_strings: Sequence[bytes]) -> None:
        self.stop_strings = tuple(dict.fromkeys(stop_strings))
        self.pending = b""
        self.matched: bytes | None = None
        self.excluded = b""

    def add(self, piece: bytes) -> bytes:
        """The bytes that may be shown now that `piece` has come; nothing after a stop text was met."""
        if not self.stop_strings:
            return piece
        if self.matched is not None:
            self.excluded += piece
            return b""
        text = self.pending + piece
        found = [(at + len(stop), at, stop) for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self.pending, self.excluded = b"", text[at:]
            return text[:at]
        shown = len(text) - max(_overlap(text, stop) for stop in self.stop_strings)
        self.pending = text[shown:]
        return text[:shown]

    def flush(self) -> bytes:
        """What was held back, now that nothing more comes."""
        held, self.pending = self.pending, b""
        return held


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
