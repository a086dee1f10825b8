"""Constrained decoding with random logits: every output is a sentence of its grammar."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.engine import Sampler, SamplerRow, SamplingParams
from whorl.engine.request import Grammar
from whorl.engine.sampling.forced_prefix import ForcedPrefix, LogitConstraint, SortedVocabulary
from whorl.engine.sampling.grammar import CACHE_MB, GrammarCompiler, GrammarMatcher
from whorl.errors import ConfigError, DataError

# Single bytes, tokens that cross grammar symbols, a duplicate token, two control ids and a row without bytes
WORDS = [b'{"', b'":', b'": ', b'", "', b'"}', b"true", b"null}", b"  ", b"12", b"-1", b'a"', b'{"a":t']
TOKENS = [*(bytes([n]) for n in range(256)), *WORDS, "é".encode(), b"a", b"ab", b"", b""]
ENDS, SIZE = (len(TOKENS) - 2, len(TOKENS) - 1), len(TOKENS) + 1
COMPILER = GrammarCompiler(TOKENS, ENDS, SIZE)
VOCABULARY = SortedVocabulary(TOKENS, SIZE)


def compiled(**grammar: str) -> GrammarMatcher:
    return COMPILER.compile(Grammar(**grammar))


def allowed(matcher: LogitConstraint) -> set[int]:
    mask = matcher.mask()
    assert mask is not None
    if mask.dtype != np.bool_:
        mask = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(mask).tolist())


def write(matcher: LogitConstraint, seed: int, limit: int = 300) -> bytes | None:
    """Sample random logits under the matcher's masks; None if there is no end within `limit` tokens."""
    sampler, g, out = Sampler(SIZE), torch.Generator().manual_seed(seed), b""
    for n_drawn in range(limit):
        logits = 2 * torch.randn(1, SIZE, generator=g)
        logits[:, list(ENDS)] += 2
        row = SamplerRow(SamplingParams(temperature=1, top_p=1), seed, n_drawn, allowed_mask=matcher.mask())
        (token,) = sampler(logits, [row])
        assert token.id in allowed(matcher) and (token.id not in ENDS or matcher.can_end)
        matcher.advance(token.id)
        if token.id in ENDS:
            assert matcher.ended
            return out
        out += TOKENS[token.id]
    assert not matcher.ended
    return None


LEAVES: list[dict[str, Any]] = [
    *({"type": kind} for kind in ("boolean", "null", "number")),
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"enum": ["red", 'a "quoted" one', 7, None]},
    {"const": "été"},
    {"type": "string", "maxLength": 4},
    {"type": "string", "pattern": "^[ab]{1,3}$"},
]


def object_schema(fields: dict[str, Any]) -> dict[str, Any]:
    closed = {"type": "object", "additionalProperties": False}
    return {**closed, "properties": fields, "required": sorted(fields)[:1]}


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of arrays, alternatives and objects of `inner` schemas."""
    arrays = inner.map(lambda item: {"type": "array", "items": item, "maxItems": 3})
    alternatives = st.lists(inner, min_size=2, max_size=2).map(lambda both: {"anyOf": both})
    names = st.sampled_from(["a", "ab", 'k"y', "ö"])
    return arrays | alternatives | st.dictionaries(names, inner, max_size=3).map(object_schema)


SCHEMAS = st.recursive(st.sampled_from(LEAVES), nested, max_leaves=5)


@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_json_schema_outputs_are_valid(schema: dict[str, Any], seed: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = write(compiled(json_schema=json.dumps(schema)), seed)
    if found is not None:
        jsonschema.validate(json.loads(found), schema)


REGEXES = ["[0-9]{2,5}", "(foo|foobar|fob)+x?", "é+(true|12)*", "a{1,40}b?", "(ab|a)*c"]
REGEXES += [r'\{"a":(true|false)\}', r"[0-9]+\.[0-9]{2}"]


@given(regex=st.sampled_from(REGEXES), seed=st.integers(0, 1000))
def test_regex_outputs_match(regex: str, seed: int) -> None:
    found = write(compiled(regex=regex), seed)
    assert found is None or re.fullmatch(regex, found.decode())


def test_lark_outputs_match() -> None:
    found = {write(compiled(lark='start: "(" start ")" | "x"'), seed) for seed in range(10)}
    assert {b"x", b"(x)"} <= found
    assert found <= {None, *(b"(" * n + b"x" + b")" * n for n in range(300))}


def can_match(regex: str, text: bytes) -> bool:
    """Whether some suffix makes `text` a match; tries every suffix of up to four letters."""
    ends = ["".join(letters) for n in range(5) for letters in itertools.product("abc", repeat=n)]
    return any(re.fullmatch(regex.encode(), text + end.encode()) for end in ends)


@pytest.mark.parametrize("regex", ["(ab|a)*c", "abc", "ab{2}|ac", "aab?(ca){1,2}", "a*"])
def test_mask_allows_exactly_valid_continuations(regex: str) -> None:
    words = [bytes([n]) for n in b"abcd"] + [b"ab", b"abc", b"bc", b"ca", b"aab", b"aac", b"ab", b""]
    compiler, g = GrammarCompiler(words, [len(words) - 1]), np.random.default_rng(0)
    for _ in range(6):
        matcher, text = compiler.compile(Grammar(regex=regex)), b""
        for _ in range(6):
            found = allowed(matcher)
            want = {n for n, word in enumerate(words[:-1]) if can_match(regex, text + word)}
            if re.fullmatch(regex.encode(), text):
                want.add(len(words) - 1)
            assert found == want and matcher.can_end == (len(words) - 1 in want)
            chosen = int(g.choice(sorted(found)))
            matcher.advance(chosen)
            if chosen == len(words) - 1:
                break
            text += words[chosen]


BYTES = st.sampled_from([b"a", b"b", b"1", b"2", b"\xff", b"\xc3", b"\xa9"])


@given(text=st.lists(BYTES, max_size=6).map(b"".join))
def test_sorted_vocabulary_matches_linear_search(text: bytes) -> None:
    words = [*TOKENS, b"\xff\xff", b"a\xff", b"a\xff\xff1", b"ab12"]
    v = SortedVocabulary(words, len(words) + 3)
    if text:
        assert set(v.ids_with_prefix(text).tolist()) == {n for n, w in enumerate(words) if w.startswith(text)}
        assert set(v.ids_of(text).tolist()) == {n for n, w in enumerate(words) if w == text}
        longer = {n for n, w in enumerate(words) if w and w != text and text.startswith(w)}
        assert set(v.ids_of_proper_prefixes(text).tolist()) == longer
    assert b"".join(words[n] for n in v.encode_greedy(text)) == text


@given(st.integers(0, 1000), st.sampled_from([b"ab12", b'{"a": ', "aé".encode(), b"a"]), st.booleans())
@settings(max_examples=40)
def test_forced_prefix_starts_output_in_any_tokens(seed: int, text: bytes, exact: bool) -> None:
    matcher, g, out = ForcedPrefix(VOCABULARY, text, exact), np.random.default_rng(seed), b""
    while matcher.mask() is not None:
        rest = text[len(out) :]
        want = {n for n, w in enumerate(TOKENS) if w and rest.startswith(w)}
        want |= {n for n, w in enumerate(TOKENS) if w.startswith(rest) and not exact}
        assert not matcher.can_end and allowed(matcher) == want
        number = int(g.choice(sorted(want)))
        matcher.advance(number)
        out += TOKENS[number]
    assert out.startswith(text) and (out == text or not exact) and matcher.can_end and not matcher.ended


@pytest.mark.parametrize(
    ("kind", "grammar", "message"),
    [
        ("regex", "a(", "regular expression cannot be compiled.*unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"[^\x00-\U0010ffff]", "allows no output"),
        ("lark", "start: foo", 'Lark grammar cannot be compiled.*unknown name: "foo"'),
        ("json_schema", "{nope", "not valid JSON.*line 1 column 2"),
        ("json_schema", "[]", r"the JSON schema is '\[\]'"),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"not": {}}', "Unimplemented keys"),
        ("json_schema", '{"$ref": "http://x.y/z"}', "http://x.y/z"),
    ],
)
def test_compile_rejects_invalid_grammars(kind: str, grammar: str, message: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message):
        compiled(**{kind: grammar})


def test_advance_rejects_disallowed_id_without_change() -> None:
    matcher = compiled(regex="[0-9]+")
    for wrong in (TOKENS.index(b"a"), ENDS[0], SIZE - 1):
        with pytest.raises(DataError, match=f"id {wrong}"):
            matcher.advance(wrong)
    matcher.advance(TOKENS.index(b"7"))
    matcher.advance(ENDS[1])
    assert matcher.ended and allowed(matcher) == set(ENDS)
    with pytest.raises(DataError):
        matcher.advance(TOKENS.index(b"7"))


def test_failed_reports_missing_tokens() -> None:
    compiler = GrammarCompiler([b"a", b"b", b""], [2])
    matcher = compiler.compile(Grammar(regex="a(b|cd)d"))
    matcher.advance(0)
    matcher.advance(1)
    assert matcher.ended and matcher.failed and np.flatnonzero(matcher.mask()).tolist() == [2]
    with pytest.raises(ConfigError, match="allows no output"):
        compiler.compile(Grammar(regex="cd"))
    stuck = ForcedPrefix(SortedVocabulary([b"a", b"b"]), b"ac")
    stuck.advance(0)
    assert stuck.ended and stuck.failed == "no token begins b'c'"


def test_compile_caches_equal_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, grammar = GrammarCompiler(TOKENS, ENDS), Grammar(regex="[a-f]+")
    first = compiler.compile(grammar)
    monkeypatch.setattr(compiler, "_library", None)
    second = compiler.compile(grammar)
    first.advance(TOKENS.index(b"a"))
    assert isinstance(second, GrammarMatcher) and not second.can_end and first.can_end


def test_compiler_rejects_missing_library_and_bad_end_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"(?s)llguidance.*pip install 'whorl\[serve\]'"):
        GrammarCompiler(TOKENS, ENDS)
    monkeypatch.undo()
    for wrong in ((), (len(TOKENS),)):
        with pytest.raises(ConfigError, match="end ids"):
            GrammarCompiler(TOKENS, wrong)


def test_memory_of_many_large_grammars_is_bounded() -> None:
    """Small regular expressions that compile to much memory: each took 150 MB for good, and 64 were kept."""

    def resident_mb() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    compiler, before = GrammarCompiler(TOKENS, ENDS, SIZE), resident_mb()
    refused = 0
    for number in range(900, 940):
        try:
            compiler.compile(Grammar(regex=f"((a{{1000}}){{1000}}){{{number}}}"))
        except ConfigError:
            refused += 1
        compiler.compile(Grammar(regex=f"(b[0-9]{{1,{number}}}|c){{1,{number}}}"))
    assert resident_mb() - before < 600
    assert sum(kept.megabytes for kept in compiler._kept.values()) <= CACHE_MB


def test_matcher_that_fails_before_its_first_id_accepts_an_end_id() -> None:
    """Copies of a matcher share a lexer with a limit. The engine samples an end id then, which must not raise."""
    compiler = GrammarCompiler(TOKENS, ENDS, SIZE)
    matcher = GrammarMatcher(compiler, compiler._compile(Grammar(regex="a" * 5000)).state.deep_copy())
    assert matcher.failed is not None and allowed(matcher) == set(ENDS)
    matcher.advance(ENDS[0])
    assert matcher.ended and matcher.failed is not None
    with pytest.raises(ConfigError, match="too large"):
        compiler.compile(Grammar(regex="a" * 5000))


def test_grammar_that_outputs_used_up_is_refused_once_and_compiled_again() -> None:
    compiler, grammar, refused = GrammarCompiler(TOKENS, ENDS, SIZE), Grammar(regex="a?" * 300), 0
    for _ in range(6):
        try:
            matcher = compiler.compile(grammar)
        except ConfigError:
            refused += 1
            matcher = compiler.compile(grammar)
        for _ in range(20):
            if not matcher.ended:
                matcher.advance(min(allowed(matcher) - set(ENDS), default=ENDS[0]))
    assert refused >= 1
