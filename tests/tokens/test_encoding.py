"""Encoding any text and bytes: equal to Hugging Face, equal in chunks, special tokens only on request."""

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

# Characters where splitting rules differ: all kinds of blanks, signs, marks, digits next to words.
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
def hf_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    other = pytest.importorskip("tokenizers")
    return other.Tokenizer.from_file(str(T.save(tmp_path_factory.mktemp("saved"))))


@settings(max_examples=300, deadline=None)
@given(texts)
def test_saved_tokenizer_matches_hugging_face(hf_tokenizer: Any, text: str) -> None:
    if any(0xD800 <= ord(c) < 0xE000 for c in text) or any(s in text for s in T.special_tokens):
        return  # the other library has no lone surrogates and always matches special tokens
    assert hf_tokenizer.encode(text, add_special_tokens=False).ids == T.encode(text).tolist()


@settings(max_examples=200, deadline=None)
@given(texts)
def test_encode_decodes_exactly_without_special_ids(text: str) -> None:
    ids = T.encode(text)
    assert T.decode(ids) == text.encode("utf-8", "surrogatepass")
    assert not len(ids) or int(ids.max()) < T.n_ordinary


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(st.integers(0, 10**6), max_size=6), st.booleans(), st.booleans())
def test_encode_stream_matches_encode_for_any_cut(
    text: str, cuts: list[int], as_bytes: bool, special: bool
) -> None:
    whole: Any = text.encode("utf-8", "surrogatepass") if as_bytes else text
    edges = [0, *sorted(c % (len(whole) + 1) for c in cuts), len(whole)]
    chunks = [whole[a:b] for a, b in itertools.pairwise(edges)]
    streamed = [i for ids in T.encode_stream(chunks, allow_special=special) for i in ids.tolist()]
    assert streamed == T.encode(whole, allow_special=special).tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=6))
def test_encode_stream_matches_encode_for_any_bytes(chunks: list[bytes]) -> None:
    streamed = [i for ids in T.encode_stream(chunks) for i in ids.tolist()]
    assert streamed == T.encode(b"".join(chunks)).tolist()


def test_encode_stream_yields_early() -> None:
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
def test_special_tokens_match_longest_first(text: str, ids: list[str]) -> None:
    expected = [T.special_token_ids[i] if i in T.special_token_ids else ord(i) for i in ids]
    assert T.encode(text, allow_special=True).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_healed_prompt_ids_are_stable(prompt: str, rest: str) -> None:
    if any(0xD800 <= ord(c) < 0xE000 for c in prompt + rest):
        return
    healed = heal(T, prompt)
    prompt_ids = healed.ids[1:]
    assert T.decode(prompt_ids) + healed.forced_prefix == prompt.encode()
    assert T.encode(prompt + rest).tolist()[: len(prompt_ids)] == prompt_ids
