"""The tokenizer: training equals its reference, encoding equals Hugging Face, special tokens only on request."""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import pre_tokenizers

from whorl.errors import ConfigError, DataError
from whorl.models.exchange.gguf_vocabulary import SPLITS
from whorl.tokens import bpe, pretokens
from whorl.tokens.tokenizer import BOS, EOS, PAD, Tokenizer
from whorl.tokens.vocabulary import MAX_HEALED_BYTES

CODE = "class A(B):\n\tdef été(ß):\r\n    return '日本' * 12345 + [x for x in y]\n\n\n# a-b_c\n"
# Special tokens that begin with another one, or that hold a blank.
SPECIALS = ["<|a|>", "<|a|>b", "<|c d|>", "<|bos|>x", "<|a"]
T = Tokenizer.train([CODE * 20], 420, special_tokens=SPECIALS)

# Characters where splitting rules differ: all kinds of blanks, signs, marks, digits next to words.
hard = st.sampled_from(" \t\r\n\f\v\u00a0\u2003\u200b\u0301\u0085\u2028aZé日½１９_.'\"()<|>😀\x00")
blanks = [" ", "  ", "\n", "\n    ", ":\n  ", "\t"]
pieces = [*CODE.split(" "), *blanks, *SPECIALS, BOS, EOS, PAD, "<|eos", "|>", "a", "x", "12345", "日本", "("]
texts = st.text(hard | st.characters(), max_size=40) | st.lists(st.sampled_from(pieces)).map("".join)
# Few letters: runs (aaaa), touching pairs (abab), and two spellings of one token (a+bc, ab+c) are common.
few_letters = st.binary(min_size=1, max_size=14).map(lambda word: bytes(b"aab c"[b % 5] for b in word))
words = few_letters | st.binary(min_size=1, max_size=8)
any_counts = st.dictionaries(words, st.integers(1, 9), max_size=14)


def has_lone_surrogate(text: str) -> bool:
    return any(0xD800 <= ord(c) < 0xE000 for c in text)


def saved(tokenizer: Tokenizer, folder: Path) -> Any:
    """Save a tokenizer and load it with the `tokenizers` library."""
    return Core.from_file(str(tokenizer.save(folder)))


def streamed(chunks: list[str] | list[bytes], special: bool = False) -> list[int]:
    return [i for ids in T.encode_stream(chunks, allow_special=special) for i in ids.tolist()]


@pytest.fixture(scope="module")
def hf_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return saved(T, tmp_path_factory.mktemp("saved"))


@given(texts)
@example("naïve café 😀😀 １２３ ½ don't I'LL a\u00a0b\u2003c\u200bd\t \r\n \f x")
@example(Path(__file__).read_text().replace("<|", "< |"))
def test_saved_tokenizer_matches_hugging_face(hf_tokenizer: Any, text: str) -> None:
    if has_lone_surrogate(text) or any(s in text for s in T.special_tokens):
        return  # the other library has no lone surrogates and always matches special tokens
    assert hf_tokenizer.encode(text, add_special_tokens=False).ids == T.encode(text).tolist()


def test_saved_tokenizer_loads_unchanged(hf_tokenizer: Any, tmp_path: Path) -> None:
    T.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.token_bytes == T.token_bytes and again.eos_id == T.eos_id
    assert hf_tokenizer.get_vocab_size() == T.vocab_size


def test_saved_merges_match_ranks_for_small_alphabets(tmp_path: Path) -> None:
    """Small alphabets make tokens that several pairs spell, where merging by pair and by rank could differ."""
    rng = random.Random(0)
    for _ in range(20):
        words = ["".join(rng.choices("abc", k=rng.randrange(1, 12))) for _ in range(40)]
        ours = Tokenizer(bpe.train({word.encode(): rng.randrange(1, 9) for word in words}, 256 + 60))
        theirs = saved(ours, tmp_path)
        for _ in range(50):
            text = "".join(rng.choices("abc", k=rng.randrange(1, 30)))
            assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids


@given(texts | st.binary(max_size=200))
def test_encode_decodes_exactly_without_special_ids(text: str | bytes) -> None:
    ids = T.encode(text)
    assert T.decode(ids) == (text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    assert not len(ids) or int(ids.max()) < T.n_ordinary


@given(texts, st.lists(st.integers(0, 10**6), max_size=6), st.booleans(), st.booleans())
def test_encode_stream_matches_encode_for_any_cut(
    text: str, cuts: list[int], as_bytes: bool, special: bool
) -> None:
    whole: Any = text.encode("utf-8", "surrogatepass") if as_bytes else text
    edges = [0, *sorted(c % (len(whole) + 1) for c in cuts), len(whole)]
    want = T.encode(whole, allow_special=special).tolist()
    assert streamed([whole[a:b] for a, b in itertools.pairwise(edges)], special) == want
    assert streamed([whole[i : i + 3] for i in range(0, len(whole), 3)], special) == want


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("text", "most"), [("some words here ", 4), ("a1+/" * 1024, 2)])
def test_encode_stream_yields_early(text: str, most: int, special: bool) -> None:
    taken = 0

    def chunks() -> Iterator[str]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield text

    next(T.encode_stream(chunks(), allow_special=special))
    assert taken <= most


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|a|>b", ["<|a|>b"]), ("<|a|><|a|>b", ["<|a|>", "<|a|>b"]), ("<|a|>c", ["<|a|>", "c"]),
        ("<<|pad|>>", ["<", PAD, ">"]),
    ],
)  # fmt: skip
def test_special_tokens_match_longest_first(text: str, ids: list[str]) -> None:
    expected = [T.special_token_ids[i] if i in T.special_token_ids else ord(i) for i in ids]
    assert T.encode(text, allow_special=True).tolist() == expected


@given(texts, texts)
@example("", "x")
@example("internationalization", "s")
@example("a" * 40, "")
def test_healed_prompt_ids_are_stable(prompt: str, rest: str) -> None:
    if has_lone_surrogate(prompt + rest):
        return
    healed = T.heal_prompt(prompt)
    prompt_ids = healed.ids[1:]
    assert healed.ids[0] == T.bos_id and len(healed.forced_prefix) <= MAX_HEALED_BYTES
    assert T.decode(prompt_ids) + healed.forced_prefix == prompt.encode()
    assert healed.n_tokens == 1 + len(T.encode(prompt))
    end = pretokens.split_pretokens(prompt)[-1] if prompt else ""
    if len(end.encode()) <= MAX_HEALED_BYTES:  # the whole pre-token: no later text changes the ids before it
        assert healed.forced_prefix == end.encode()
        assert T.encode(prompt + rest).tolist()[: len(prompt_ids)] == prompt_ids


NAMED = {
    name: Tokenizer.train([CODE * 20], 420, special_tokens=["<|c d|>"], pattern=name)
    for name in pretokens.PATTERNS
    if name != "whorl"
}
GPT2 = NAMED["gpt2"]


@given(texts, st.lists(st.integers(0, 10**6), max_size=4), st.booleans())
@example("it's I'LL  x\u00a0 y  \n  z ½１２３", [2], True)
def test_gpt2_pattern_matches_hugging_face(text: str, cuts: list[int], special: bool) -> None:
    """Pre-tokens and ids are those of the ByteLevel pre-tokenizer of `tokenizers`; streams and prompts agree.

    Characters that Python's Unicode does not know are left out: the two libraries have different versions of it.
    """
    if has_lone_surrogate(text) or any(unicodedata.category(c) == "Cn" for c in text):
        return
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    want = [text[start:end] for _, (start, end) in pieces]
    assert pretokens.split_pretokens(text, GPT2.pattern) == want
    ids = GPT2.encode(text, allow_special=special).tolist()
    assert GPT2.decode(ids) == text.encode()
    if not special:
        assert ids == [i for piece in want for i in GPT2.encode(piece).tolist()]
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert [i for part in GPT2.encode_stream(chunks, allow_special=special) for i in part.tolist()] == ids
    healed = GPT2.heal_prompt(text)
    assert GPT2.decode(healed.ids[1:]) + healed.forced_prefix == text.encode()


@given(texts, st.lists(st.integers(0, 10**6), max_size=4), st.booleans(), st.sampled_from(sorted(NAMED)))
@example("IT'Ll x\u00a0 y  \n  z 日本。『x』 \x1c \x1f a/\n/ あAあAAAAb 't", [], True, "o200k")
def test_named_patterns_stream_the_ids_of_the_whole(
    text: str, cuts: list[int], special: bool, name: str
) -> None:
    tokenizer = NAMED[name]
    whole = text.encode("utf-8", "surrogatepass")
    ids = tokenizer.encode(whole, allow_special=special).tolist()
    edges = [0, *sorted(c % (len(whole) + 1) for c in cuts), len(whole)]
    for chunks in (
        [whole[a:b] for a, b in itertools.pairwise(edges)],
        [whole[i : i + 1] for i in range(len(whole))],
    ):
        stream = tokenizer.encode_stream(chunks, allow_special=special)
        assert [i for part in stream for i in part.tolist()] == ids


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("text", ["some words here ", "一二三。四五六，", "++ -- ** ", "a=b;c1|"])
def test_named_patterns_stream_in_bounded_memory(text: str, name: str) -> None:
    """No part is longer than two chunks, so no more is held."""
    chunk = text * 32
    parts = list(NAMED[name].encode_stream([chunk] * 50))
    assert max(len(NAMED[name].decode(part)) for part in parts) <= 2 * len(chunk.encode())


def test_named_patterns_are_those_of_the_gguf_export() -> None:
    assert {(p,) for name, p in pretokens.PATTERNS.items() if name != "whorl"} <= set(SPLITS)


def test_pattern_at_its_limit_is_an_error_of_the_text() -> None:
    with pytest.raises(DataError, match="fails on this text"):
        GPT2.encode(" " * 2_000_000 + "b")


@pytest.mark.parametrize("pattern", ["whorl", "gpt2", "o200k", r"\p{L}+|[\s\S]"])
def test_pattern_is_saved_and_loaded(pattern: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.train([CODE * 20], 420, pattern=pattern)
    core = saved(tokenizer, tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.pattern == tokenizer.pattern == pretokens.PATTERNS.get(pattern, pattern)
    for text in (CODE, "a  b\n\n c 12345 d.e", "it's"):
        ids = tokenizer.encode(text).tolist()
        assert again.encode(text).tolist() == ids == core.encode(text, add_special_tokens=False).ids


def test_patterns_that_cannot_be_used_are_named() -> None:
    for bad in ("(", r"(?<=a+)b(*)"):
        with pytest.raises(ConfigError, match="split pattern"):
            Tokenizer.train(["ab ab"], 300, pattern=bad)
    for use in (lambda: Tokenizer.train(["ab ab"], 300, pattern=r"\w+"),
                lambda: Tokenizer(T.token_bytes[:256], pattern=r"\w+").encode("a b")):  # fmt: skip
        with pytest.raises(DataError, match="leaves out a part"):
            use()


def test_load_refuses_a_tokenizer_of_another_project(tmp_path: Path) -> None:
    """Its special tokens have other names; adding ours would change ids."""
    path = T.save(tmp_path)
    path.write_text(path.read_text().replace(BOS, "<s>"))
    with pytest.raises(DataError, match="HFTokenizer"):
        Tokenizer.load(tmp_path)


def test_load_refuses_ids_with_gaps_and_deep_files(tmp_path: Path) -> None:
    data = json.loads(T.save(tmp_path).read_text())
    data["added_tokens"][-1]["id"] = 10**9
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(DataError, match="gaps between its ids"):
        Tokenizer.load(tmp_path)
    for damaged in ("[" * 100_000, '{"model": {"vocab": []}}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(DataError, match="cannot be read"):
            Tokenizer.load(tmp_path)


def test_tokenizer_rejects_impossible_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocabulary of 200"):
        Tokenizer.train(["x"], 200)
    with pytest.raises(DataError):
        T.decode([10**6])
    with pytest.raises(DataError):
        Tokenizer.load(tmp_path)


@given(any_counts, st.integers(256, 300), st.integers(1, 4))
def test_train_matches_naive(counts: dict[bytes, int], n_tokens: int, min_count: int) -> None:
    fast = bpe.train(counts, n_tokens, min_count=min_count)
    assert fast == bpe.train_naive(counts, n_tokens, min_count=min_count)
    merges = bpe.train_merges(counts, n_tokens, min_count=min_count)
    known = set(fast[:256])
    for left, right in merges:  # each half exists when it is merged
        assert {left, right} <= known
        known.add(left + right)
    assert fast[256:] == list(dict.fromkeys(left + right for left, right in merges))


@given(any_counts, st.randoms(use_true_random=False))
def test_train_ignores_order_of_text(counts: dict[bytes, int], order: random.Random) -> None:
    items = list(counts.items())
    order.shuffle(items)
    assert bpe.train(dict(items), 290) == bpe.train(counts, 290)


@pytest.mark.parametrize(
    ("counts", "first"),
    [
        ({b"ab": 3, b"cd": 3}, [b"cd"]),
        ({b"ab": 3, b"cd": 3, b"ce": 3}, [b"ce"]),
        ({b"cd": 3, b"ab": 4}, [b"ab"]),  # a higher count wins
        ({b"\xff\x00": 2, b"\xfe\xff": 2}, [b"\xff\x00"]),
        ({b"ax": 2, b"ay": 2}, [b"ay"]),  # the left halves tie, the right half decides
        ({b"abc": 2, b"ab": 3, b"ad": 2}, [b"ab", b"abc"]),  # (ab, c) and (a, d) tie, and "ab" > "a"
    ],
)
def test_train_breaks_ties_by_greatest_pair(counts: dict[bytes, int], first: list[bytes]) -> None:
    assert bpe.train(counts, 256 + len(first))[256:] == first


def test_count_pretokens_removes_special_tokens() -> None:
    text = f"one{EOS}two{EOS}<|tool|>s{EOS}" * 50
    assert pretokens.count_pretokens([text], [EOS, "<|tool|>"]) == Counter({b"one": 50, b"two": 50, b"s": 50})
    tokenizer = Tokenizer.train([text], 300, special_tokens=["<|tool|>"])
    learnt = tokenizer.token_bytes[256 : tokenizer.n_ordinary]
    assert learnt and not any(set(b"<|>") & set(token) for token in learnt)


def test_count_pretokens_with_workers_matches_serial() -> None:
    text = "def é(x):\n    return x + 12345\n" * 20000  # enough for a process pool
    texts = [text[i * 10_000 : (i + 1) * 10_000] + f"{i}" for i in range(len(text) // 10_000)] * 8
    texts.append("last\ud800")
    assert sum(map(len, texts)) > 4 << 20
    assert pretokens.count_pretokens(texts, workers=2) == pretokens.count_pretokens(texts, workers=1)
