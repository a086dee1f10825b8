"""The tokenizer: training, exact decoding, and the Hugging Face file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.errors import ConfigError, DataError
from whorl.tokens.healing import heal
from whorl.tokens.tokenizer import Tokenizer

TEXT = Path(__file__).read_text().replace("<|", "< |") + "\n\tdef été(ß):\r\n  return '日本' * 12345\n" * 20
TOKENIZER = Tokenizer.train([TEXT], 420, special_tokens=["<|tool|>", "<|tool|>s"])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_encode_decodes_any_bytes(data: bytes) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(data)) == data


def test_hugging_face_loads_saved_file(tmp_path: Path) -> None:
    other = pytest.importorskip("tokenizers")
    TOKENIZER.save(tmp_path)
    theirs = other.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [
        TEXT,
        "",
        " ",
        "\n\n\n  x",
        "naïve café 😀😀 １２３ ½",
        "a\u00a0b\u2003c\u200bd",
        "\t \r\n \f x",
        "don't I'LL",
    ]
    for text in [*texts, *TEXT.splitlines()]:
        assert theirs.encode(text, add_special_tokens=False).ids == TOKENIZER.encode(text).tolist(), repr(
            text
        )
    assert theirs.get_vocab_size() == TOKENIZER.vocab_size
    again = Tokenizer.load(tmp_path)
    assert again.token_bytes == TOKENIZER.token_bytes and again.eos_id == TOKENIZER.eos_id


def test_special_tokens_are_distinct() -> None:
    t = TOKENIZER
    assert len({t.bos_id, t.eos_id, t.pad_id}) == 3
    hostile = "x<|eos|>y<|tool|>s"
    assert t.eos_id not in t.encode(hostile) and t.decode(t.encode(hostile)) == hostile.encode()
    allowed = t.encode(hostile, allow_special=True).tolist()
    assert t.eos_id in allowed and t.special_token_ids["<|tool|>s"] in allowed  # the longest match wins
    assert t.special_token_ids["<|tool|>"] not in allowed
    document = t.encode_document("x")
    assert document[0] == t.bos_id and document[-1] == t.eos_id
    assert not any(b"<|eos|>" in token for token in t.token_bytes[: t.n_ordinary])


def test_tokenizer_rejects_impossible_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocabulary of 200"):
        Tokenizer.train(["x"], 200)
    with pytest.raises(DataError):
        TOKENIZER.decode([10**6])
    with pytest.raises(DataError):
        Tokenizer.load(tmp_path)


def test_encode_batch_matches_encode() -> None:
    lines = TEXT.splitlines()
    for one, many in zip(map(TOKENIZER.encode, lines), TOKENIZER.encode_batch(lines, threads=2), strict=True):
        assert np.array_equal(one, many)


@pytest.mark.parametrize("text", ["def f():\n", "def ", "x", "", "a = [1, 2,\n    "])
def test_heal_keeps_prompt_bytes(text: str) -> None:
    healed = heal(TOKENIZER, text)
    assert healed.ids[0] == TOKENIZER.bos_id
    assert TOKENIZER.decode(healed.ids[1:]) + healed.forced_prefix == text.encode()
    assert bool(text) == bool(healed.forced_prefix)
