"""Ids of (context, continuation) pairs against lm-evaluation-harness's rule over `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.evals.hf_folders import KINDS, sentences, write_tokenizer

from whorl.errors import DataError
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tokens.token_encoder import TokenEncoder


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, request.param, sentences(200))
    return path


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> TokenEncoder:
    tokenizer = load_tokenizer(folder)
    exported = (folder / "tokenizer.json").read_text().find("<|pad|>") > 0  # by this package
    return TokenEncoder(tokenizer, add_bos=False if exported else None)


def harness_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """TemplateLM.loglikelihood and _encode_pair of lm_eval 0.4.13, in other words."""
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

    def encode(text: str) -> list[int]:
        plain = {"add_special_tokens": False} if text.startswith(tokenizer.decode(prefix)) else {}
        return list(tokenizer.encode(text, **plain))

    if context == "":
        ids = list(tokenizer.encode(continuation, add_special_tokens=False))
        return ([prefix], ids) if ids[0] != prefix else (ids[:1], ids[1:])
    n_spaces = len(context) - len(context.rstrip())
    if n_spaces:
        context, continuation = context[:-n_spaces], context[-n_spaces:] + continuation
    before = encode(context)
    return before, encode(context + continuation)[len(before) :]


PAIRS = [
    ("The red dog", " runs"), ("The red dog ", "runs"), ("Answer:\n\n", "the cat"), ("The red d", "og"), ("", "The cat"),
    ("", " 12, and"), ("Über 1", "2 naïve 日本語"), ("a\t", " b"), ("<s> the", " cat"), ("", "<s>the"),
    ("", "<|endoftext|>a"),
    ("<|endoftext|>the dog", " not <|pad|>"),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_have_ids_of_harness(pair: tuple[str, str], encoder: TokenEncoder, oracle: Any) -> None:
    special = any(text in "".join(pair) for text in ("<|pad|>",))
    if special and encoder.tokenizer.vocab_size and not hasattr(encoder.tokenizer, "all_special_ids"):
        pytest.skip("this package's tokenizer encodes the text of a special token as text")
    [got] = encoder.encode_pairs([pair])
    assert (got.context, got.continuation) == harness_pair(oracle, *pair)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("ab the,.1\n é", max_size=12), st.text("ab the,.1\n é", min_size=1, max_size=8))
def test_random_pairs_have_ids_of_harness(
    encoder: TokenEncoder, oracle: Any, context: str, continuation: str
) -> None:
    if not context.strip() and (context or not continuation.strip()):
        return  # the harness fails
    [got] = encoder.encode_pairs([(context, continuation)])
    assert (got.context, got.continuation) == harness_pair(oracle, context, continuation)


def test_context_of_white_space_is_the_prefix(encoder: TokenEncoder) -> None:
    [spaces, empty] = encoder.encode_pairs([("  ", "the cat"), ("", "  the cat")])
    assert spaces == empty and spaces.context == [encoder.prefix_id]


def test_document_begins_with_prefix_once(encoder: TokenEncoder) -> None:
    ids = encoder.encode_document("The red dog")
    assert ids[0] == encoder.prefix_id and encoder.prefix_id not in ids[1:]


def test_lone_surrogate_is_rejected(encoder: TokenEncoder) -> None:
    with pytest.raises(DataError, match="a text of the request holds"):
        encoder.encode_pairs([("the", " cat"), ("the \ud800", " dog")])


def test_whorl_tokenizer_adds_bos_by_default(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "whorl", sentences(50))
    encoder = TokenEncoder(load_tokenizer(tmp_path))
    [pair] = encoder.encode_pairs([("The red", " dog")])
    assert pair.context[0] == encoder.prefix_id and encoder.prefix_id not in pair.continuation
