"""Constrained decoding: only ids after which the output can still become a sentence of a grammar are allowed.

    compiler = GrammarCompiler(token_bytes, end_ids)       once per tokenizer
    matcher = compiler.compile(Grammar(regex="[0-9]+"))    once per request; equal grammars are compiled once
    mask = matcher.mask(); ...; matcher.advance(token)     every step: `SamplerRow.allowed_mask`, then the sampled id

`compile` may be called from several threads; it releases the interpreter's lock. It has no limit of time: a server checks
the grammars of its clients first (`serve/worker/grammar_check.py`) and compiles them in another thread (`compile_ahead`).

Grammars are over bytes, and tokens cross the borders of grammar symbols: one token may close a string, write the comma and
open the next key. The library llguidance walks the trie of all tokens with an Earley parser (Earley 1970,
doi:10.1145/362007.362035) whose terminals are regular expressions matched by derivatives. A mask takes it about 10
microseconds. It is an optional dependency (`pip install 'whorl[serve]'`).

Two points differ from the library's defaults:

- Where the grammar leaves no choice of bytes (`"name":` after `{` in a schema with one key), the library allows only its
  tokenizer's token. Here `mask` allows every token that starts the forced bytes, or that starts with them and continues
  validly, so that the model may use the tokens of its training.
- JSON may have at most 16 spaces and newlines between two symbols, because a model could write them without end. A schema's
  own "x-guidance" settings take precedence.

A vocabulary with all single bytes never gets stuck. Another one may, and so may a grammar that grows beyond the library's
limits. Then `failed` gives the reason, and only end ids are allowed.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

import numpy as np
import psutil

from whorl.engine.request import Grammar
from whorl.engine.sampling.forced_prefix import SortedVocabulary, TokenMask
from whorl.errors import ConfigError, DataError, shorten

JSON_DEFAULTS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,16}"}
# Fuel of the library's lexer, and the MB that a compiled grammar takes at most with it (measured). A regular expression of
# 30 bytes takes 170 MB with the library's own limit of 1,000,000.
FUEL_STEPS = ((5_000, 1), (100_000, 17))
STEP_FUEL = 50_000  # for each position of a text
CACHE_MB = 32  # compiled grammars that are kept; one takes milliseconds to compile again


@dataclass(eq=False)
class _Compiled:
    """A compiled grammar at its start, and its size."""

    state: Any
    megabytes: int


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Args:
        token_bytes: of each id; empty for control ids without text.
        end_ids: allowed where the output may end; their bytes are ignored.
        vocab_size: V of the logits, if larger than len(token_bytes).
        cache_mb: compiled grammars that are kept. Those in use are found again in any case.

    Raises:
        ConfigError: llguidance is not installed; no end id, or one outside of the vocabulary.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        end_ids: Iterable[int],
        vocab_size: int | None = None,
        cache_mb: int = CACHE_MB,
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "constrained decoding needs the package llguidance, which is not installed",
                do="pip install 'whorl[serve]'",
            ) from error
        self.end_ids = tuple(sorted(set(end_ids)))
        vocab_size = max(vocab_size or 0, len(token_bytes))
        if not self.end_ids or self.end_ids[0] < 0 or self.end_ids[-1] >= vocab_size:
            raise ConfigError(
                f"the end ids are {list(self.end_ids)}",
                expected=f"at least one id from 0 to {vocab_size - 1}",
            )
        texts = [*token_bytes, *[b""] * (vocab_size - len(token_bytes))]
        for token_id in self.end_ids:
            texts[token_id] = b""
        self.vocabulary = SortedVocabulary(texts)
        self._library: Any = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            _wrap_tokenizer(llguidance, self.vocabulary, self.end_ids),
            n_vocab=vocab_size,
            eos_token=list(self.end_ids),
        )
        self._cache_mb, self._lock = cache_mb, threading.Lock()
        self._kept: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._in_use: WeakValueDictionary[Grammar, _Compiled] = WeakValueDictionary()  # includes `_kept`

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher at the start of `grammar`.

        Raises:
            ConfigError: the grammar is invalid, beyond the library's limits, or allows no output.
        """
        with self._lock:
            entry = self._in_use.get(grammar)
        entry = entry or self._compile(grammar)
        with self._lock:
            self._in_use[grammar] = self._kept[grammar] = entry
            self._kept.move_to_end(grammar)
            while sum(kept.megabytes for kept in self._kept.values()) > self._cache_mb:
                self._kept.popitem(last=False)
        matcher = GrammarMatcher(self, entry.state.deep_copy(), entry)
        if matcher.failed is not None:
            # Copies share the library's lexer, which grows with every output up to a limit. The next call compiles it again.
            with self._lock:
                self._kept.pop(grammar, None)
                self._in_use.pop(grammar, None)
            raise ConfigError(f"the grammar is too large: {matcher.failed}", expected="a smaller grammar")
        return matcher

    def _compile(self, grammar: Grammar) -> _Compiled:
        """Return a compiled grammar, from the smallest limit of fuel that suffices."""
        before = psutil.Process().memory_info().rss
        name, text = _to_library_grammar(self._library.LLMatcher, grammar)
        for fuel, megabytes in FUEL_STEPS:
            limits = self._library.LLParserLimits(
                initial_lexer_fuel=fuel, step_lexer_fuel=STEP_FUEL, verbose_errors=False
            )
            compiled = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
            error = shorten(compiled.get_error().strip()) if compiled.is_error() else ""
            if not error:
                error = GrammarMatcher(self, compiled.deep_copy()).failed or ""
            if not error:
                grown = (psutil.Process().memory_info().rss - before) >> 20
                return _Compiled(compiled, max(megabytes, grown))
        if not compiled.is_error():
            raise ConfigError(
                f"{name} allows no output that the vocabulary can spell, or is too large: {error}"
            )
        raise ConfigError(
            f"{name} cannot be compiled: {error}",
            expected="a grammar that llguidance supports, of moderate size",
        )


class GrammarMatcher:
    """A position in a sentence of a grammar; a `LogitConstraint`. Made by `GrammarCompiler.compile`."""

    def __init__(self, compiler: GrammarCompiler, state: Any, compiled: Any = None) -> None:
        self.compiler, self._state = compiler, state
        self._compiled = compiled  # not used, but found again by the compiler while a matcher lives
        self._n_end_ids = 0  # end ids received: the library does not count them
        self._failed: str | None = None
        self._mask: TokenMask | None = None  # cached mask of this position

    @property
    def can_end(self) -> bool:
        return bool(self._n_end_ids or self._state.is_accepting())

    @property
    def ended(self) -> bool:
        return bool(self._n_end_ids or self._state.is_stopped() or self.failed is not None)

    @property
    def failed(self) -> str | None:
        """Reason of the failure: no token fits, or the grammar grew beyond the library's limits."""
        self.mask()
        return self._failed

    def mask(self) -> TokenMask:
        """Allowed next ids, [V] bool or packed in int32. End ids are allowed where the output may end, and are the only ones
        where it must end or has failed.
        """
        if self._mask is None:
            if not self._n_end_ids and not self._state.is_stopped():
                self._mask = self._continuation_mask()
                self._failed = self._state.get_error().strip() or None
                if self._failed is None and not self._mask.any():
                    self._failed = "no token of the vocabulary fits"
            if self._mask is None or self._failed is not None:
                self._mask = np.zeros(self.compiler.vocabulary.vocab_size, np.bool_)
                self._mask[list(self.compiler.end_ids)] = True
        return self._mask

    def _continuation_mask(self) -> TokenMask:
        """The mask where the sentence may continue."""
        forced = self._state.compute_ff_bytes()
        if not forced:
            return np.frombuffer(self._state.compute_bitmask(), np.int32)
        vocabulary = self.compiler.vocabulary
        allowed = np.zeros(vocabulary.vocab_size, np.bool_)
        allowed[vocabulary.ids_of_proper_prefixes(forced)] = True
        candidates = vocabulary.ids_with_prefix(forced).tolist()
        allowed[[token_id for token_id in candidates if self._state.validate_tokens([token_id])]] = True
        return allowed

    def advance(self, token_id: int) -> None:
        """Advance by one id.

        Raises:
            DataError: the id is not allowed here; the state is unchanged.
        """
        if token_id in self.compiler.end_ids:
            allowed = self.can_end or self.failed is not None
            self._n_end_ids += allowed
        else:
            allowed = not self._n_end_ids and bool(self._state.validate_tokens([token_id]))
            if allowed:
                self._state.consume_token(token_id)
        if not allowed:
            raise DataError(f"the grammar does not allow the id {token_id} here")
        self._mask = None


def compile_ahead(compile_grammar: Callable[[Grammar], Any], grammar: Grammar) -> Any:
    """Compile a grammar in a thread other than the engine's. While the result exists, the engine finds it.

    A kept grammar that is used up raises once and is dropped, so it is compiled again.

    Raises:
        ConfigError: as `GrammarCompiler.compile`.
    """
    with suppress(ConfigError):
        return compile_grammar(grammar)
    return compile_grammar(grammar)


def _to_library_grammar(library: Any, grammar: Grammar) -> tuple[str, str]:
    """Return (name for messages, the library's form of the grammar)."""
    if grammar.regex is not None:
        return "the regular expression", library.grammar_from_regex(grammar.regex)
    if grammar.lark is not None:
        return "the Lark grammar", library.grammar_from_lark(grammar.lark)
    try:
        schema = json.loads(grammar.json_schema or "")
    except ValueError as error:
        raise ConfigError(f"the JSON schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"the JSON schema is {str(schema)[:40]!r}", expected="an object")
    return "the JSON schema", library.grammar_from_json_schema(
        json.dumps(_quote_references(schema)), defaults=JSON_DEFAULTS
    )


def _quote_references(schema: Any) -> Any:
    """Return a schema whose references are URIs: `#/$defs/Café` is written `#/$defs/Caf%C3%A9`."""
    if isinstance(schema, list):
        return [_quote_references(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: quote(value, safe="%/#?:@!$&'()*+,;=~")
        if key == "$ref" and isinstance(value, str)
        else _quote_references(value)
        for key, value in schema.items()
    }


def _wrap_tokenizer(library: Any, vocabulary: SortedVocabulary, end_ids: Sequence[int]) -> Any:
    """Return the tokenizer in the library's form; ids without text become special tokens with unique names."""
    texts = [text or f"<|{token_id}|>".encode() for token_id, text in enumerate(vocabulary.token_bytes)]

    class Wrapped(library.TokenizerWrapper):  # type: ignore[misc]
        is_tokenizer_wrapper = True
        eos_token_id, bos_token_id, tokens = end_ids[0], None, texts
        special_token_ids = tuple(n for n, text in enumerate(vocabulary.token_bytes) if not text)

        def __init__(self) -> None:
            pass

        def __call__(self, text: str | bytes) -> list[int]:
            """Some tokens that spell `text`: the library calls this for forced bytes, and the result is not used."""
            return vocabulary.encode_greedy(text.encode() if isinstance(text, str) else text)

    return Wrapped()
