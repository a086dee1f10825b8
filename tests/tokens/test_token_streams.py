"""Streams and the standard file with hard input: cut special tokens, invalid bytes, text without blanks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.tokens import bpe
from whorl.tokens.tokenizer import Tokenizer

SPECIALS = ["<|bos|>x", "<|a b|>", "<|a"]
TOKENIZER = Tokenizer.train(
    [Path(__file__).read_text() + "é日本\r\n" * 9], 400, special_tokens=SPECIALS, workers=1
)
ATOMS = [*SPECIALS, "<|bos|>", "<|eos", "|>", " ", "  ", "\n", ":\n  ", "x", "12345", "é", "日本", "(", "\t"]


def _ids(chunks: list[str] | list[bytes], special: bool) -> list[int]:
    return [int(i) for ids in TOKENIZER.encode_stream(chunks, allow_special=special) for i in ids]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(ATOMS), max_size=12), st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_encode_stream_joins_cut_special_tokens(atoms: list[str], cuts: list[int], special: bool) -> None:
    text = "".join(atoms)
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    whole = TOKENIZER.encode(text, allow_special=special).tolist()
    assert _ids([text[a:b] for a, b in itertools.pairwise(edges)], special) == whole
    data = text.encode()
    assert _ids([data[i : i + 3] for i in range(0, len(data), 3)], special) == whole


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from([b"a", b" ", b"\n", b"\xff", b"\xc3", b"\xa9", b"\xe6\x97", b"<|a", b"(", b"1"]),
        max_size=20,
    ),
    st.integers(1, 5),
    st.booleans(),
)
def test_encode_stream_joins_cut_invalid_bytes(atoms: list[bytes], step: int, special: bool) -> None:
    data = b"".join(atoms)
    whole = TOKENIZER.encode(data, allow_special=special).tolist()
    assert _ids([data[i : i + step] for i in range(0, len(data), step)], special) == whole


@pytest.mark.parametrize("special", [False, True])
def test_encode_stream_without_blanks_yields_early(special: bool) -> None:
    taken = 0

    def chunks() -> Iterator[str]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield "a1+/" * 1024

    stream = TOKENIZER.encode_stream(chunks(), allow_special=special)
    next(stream)
    assert taken <= 2


def test_saved_merges_match_ranks_for_small_alphabets(tmp_path: Path) -> None:
    """Small alphabets make tokens that several pairs spell, where merging by pair and by rank could differ."""
    other = pytest.importorskip("tokenizers")
    rng = random.Random(0)
    for _ in range(20):
        words = ["".join(rng.choices("abc", k=rng.randrange(1, 12))) for _ in range(40)]
        ours = Tokenizer(bpe.train({word.encode(): rng.randrange(1, 9) for word in words}, 256 + 60))
        ours.save(tmp_path)
        theirs = other.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        for _ in range(50):
            text = "".join(rng.choices("abc", k=rng.randrange(1, 30)))
            assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
