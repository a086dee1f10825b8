"""Encoding any text and bytes: alike elsewhere, in pieces, and with special tokens only when asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.tokens.healing import heal
from whorl.tokens.tokenizer import BOS, EOS, PAD, Tokenizer

CODE = "class A(B):\n\tdef été(ß):\r\n    return '日本' * 12345 + [x for x in y]\n\n\n# a-b_c\n"
T = Tokenizer.train([CODE * 20], 420, special_tokens=["<|a|>", "<|a|>b", "<|c d|>"])

# Characters where splitting rules differ: blanks of all kinds, signs, marks, digits beside words.
awkward = st.text(
    st.sampled_from(" \t\r\n\f\v\u00a0\u2003\u200b\u0301\u0085\u2028aZé日½１9_.'\"()<|>😀\x00")
    | st.characters(),
    max_size=40,
)
words = st.lists(
    st.sampled_from([*CODE.split(" "), " ", "\n    ", "a", BOS, EOS, PAD, "<|a|>", "<|a|>b", "<|c d|>"])
)
texts = st.one_of(awkward, words.map("".join))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    other = pytest.importorskip("tokenizers")
    return other.Tokenizer.from_file(str(T.save(tmp_path_factory.mktemp("saved"))))


@settings(max_examples=300, deadline=None)
@given(texts)
def test_hugging_face_encodes_the_saved_file_alike(theirs: Any, text: str) -> None:
    if any(0xD800 <= ord(c) < 0xE000 for c in text) or any(s in text for s in T.special_tokens):
        return  # theirs holds no lone surrogates, and always reads special tokens
    assert theirs.encode(text, add_special_tokens=False).ids == T.encode(text).tolist()


@settings(max_examples=200, deadline=None)
@given(texts)
def test_any_text_comes_back_and_special_text_is_ordinary(text: str) -> None:
    ids = T.encode(text)
    assert T.decode(ids) == text.encode("utf-8", "surrogatepass")
    assert not len(ids) or int(ids.max()) < T.n_ordinary


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(st.integers(0, 10**6), max_size=6), st.booleans(), st.booleans())
def test_chunks_cut_anywhere_encode_as_the_whole(
    text: str, cuts: list[int], as_bytes: bool, special: bool
) -> None:
    whole: Any = text.encode("utf-8", "surrogatepass") if as_bytes else text
    edges = [0, *sorted(c % (len(whole) + 1) for c in cuts), len(whole)]
    chunks = [whole[a:b] for a, b in itertools.pairwise(edges)]
    streamed = [i for ids in T.encode_stream(chunks, allow_special=special) for i in ids.tolist()]
    assert streamed == T.encode(whole, allow_special=special).tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=6))
def test_chunks_of_any_bytes_encode_as_the_whole(chunks: list[bytes]) -> None:
    streamed = [i for ids in T.encode_stream(chunks) for i in ids.tolist()]
    assert streamed == T.encode(b"".join(chunks)).tolist()


def test_a_stream_yields_before_its_end() -> None:
    pulled = []

    def chunks() -> Any:
        for i in range(1000):
            pulled.append(i)
            yield "some words here "

    next(iter(T.encode_stream(chunks())))
    assert len(pulled) < 5


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|a|>b", ["<|a|>b"]),
        ("<|a|><|a|>b", ["<|a|>", "<|a|>b"]),
        ("<|a|>c", ["<|a|>", "c"]),
        ("<<|pad|>>", ["<", PAD, ">"]),
    ],
)
def test_allowed_special_tokens_are_read_longest_first(text: str, ids: list[str]) -> None:
    expected = [T.special_token_ids[i] if i in T.special_token_ids else ord(i) for i in ids]
    assert T.encode(text, allow_special=True).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_a_healed_prompt_ends_at_a_border_whatever_follows(prompt: str, rest: str) -> None:
    if any(0xD800 <= ord(c) < 0xE000 for c in prompt + rest):
        return
    healed = heal(T, prompt)
    kept = healed.ids[1:]
    assert T.decode(kept) + healed.forced_prefix == prompt.encode()
    assert T.encode(prompt + rest).tolist()[: len(kept)] == kept
