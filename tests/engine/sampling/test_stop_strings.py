"""Stop strings in a stream, compared with a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whorl.engine.sampling.stop_strings import StopStringChecker

LETTERS = st.integers(0, 2).map(lambda i: b"abc"[i : i + 1])
TEXTS = st.lists(LETTERS, min_size=1, max_size=4).map(b"".join)


def first_stop(text: bytes, stops: list[bytes]) -> tuple[int, bytes] | None:
    """Start and value of the stop string that is complete first; tries every end."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


@given(
    pieces=st.lists(st.lists(LETTERS, max_size=5).map(b"".join), max_size=12),
    stops=st.lists(TEXTS, max_size=4),
)
def test_stop_strings_match_search_of_whole_text(pieces: list[bytes], stops: list[bytes]) -> None:
    stream, shown, whole = StopStringChecker(stops), b"", b""
    for piece in pieces:
        whole += piece
        shown += stream.add(piece)
        found = first_stop(whole, stops)
        if found is None:
            # No byte is shown that a stop string could still cover, and no other byte is held back.
            swallowed = [n for stop in stops for n in range(len(stop)) if whole.endswith(stop[:n])]
            assert shown == whole[: len(whole) - max(swallowed, default=0)] and stream.matched is None
        else:
            assert (shown, stream.matched) == (whole[: found[0]], found[1])
            assert stream.excluded == whole[found[0] :]
    shown += stream.flush()
    found = first_stop(whole, stops)
    assert shown == (whole if found is None else whole[: found[0]])
    assert stream.flush() == b""


def test_stop_string_inside_character_and_across_tokens() -> None:
    stream = StopStringChecker(["é\n".encode(), b"END"])
    assert [stream.add(piece) for piece in (b"caf\xc3", b"\xa9", b"s E", b"N", b"ding EN", b"Dx")] == [
        b"caf", b"", "és ".encode(), b"", b"ENding ", b"",
    ]  # fmt: skip
    assert stream.matched == b"END" and stream.excluded == b"ENDx" and stream.flush() == b""
