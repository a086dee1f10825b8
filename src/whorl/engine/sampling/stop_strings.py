"""Stop strings in a token stream: visible text, held-back text, and the end of the output.

A stop string may span tokens, so the end of the stream is held back while it may be the start of one. Everything is bytes:
a token, and a match, may end inside a character.

Among several stop strings, the one that is complete first ends the stream; of those complete at the same byte, the one that
started first. So the result depends on the bytes alone, not on the tokens ("abcd" and "bc" in "abcd": the stream ends at
"abc", and "a" is shown).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringChecker:
    """Holds back bytes that may start a stop string.

    matched: the stop string that ended the stream, or None.

    Args:
        stop_strings: none empty (`Request` rejects an empty one).
    """

    def __init__(self, stop_strings: Sequence[bytes]) -> None:
        self.stop_strings = tuple(dict.fromkeys(stop_strings))
        self.pending = b""
        self.matched: bytes | None = None

    def add(self, piece: bytes) -> bytes:
        """Return the bytes that may be shown after `piece`; nothing after a match."""
        if not self.stop_strings:
            return piece
        if self.matched is not None:
            return b""
        text = self.pending + piece
        found = [(at + len(stop), at, stop) for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self.pending = b""
            return text[:at]
        shown = len(text) - max(_overlap(text, stop) for stop in self.stop_strings)
        self.pending = text[shown:]
        return text[:shown]

    def flush(self) -> bytes:
        """Return the bytes held back, at the end of the stream."""
        held, self.pending = self.pending, b""
        return held


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
