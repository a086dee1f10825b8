"""Decoding under a grammar: only ids after which the output can still become a sentence of it may be drawn.

    compiler = GrammarCompiler(token_bytes, end_ids)       once for a tokenizer
    matcher = compiler.compile(Grammar(regex="[0-9]+"))    once for a request; the same grammar is compiled once
    mask = matcher.mask(); ...; matcher.advance(drawn)     every step: what goes into `Row.allowed`, and what was drawn of it

Grammars are over bytes, tokens are pieces of bytes that do not care where a word of the grammar ends: a token may close a
string, write the comma and open the next key. The library llguidance walks the tree of all tokens along with an Earley
parser (Earley 1970, doi:10.1145/362007.362035) whose words are regular expressions followed by derivatives, and knows after
some 10 microseconds which of them fit. It is an optional dependency (`pip install 'whorl[serve]'`).

Two things here are not the library's way:

- Where the grammar leaves no choice of bytes (`"name":` after `{` in a schema with one key), the library allows only the one
  token that its tokenizer would choose. Ours is asked for nothing but bytes, and the model may spell them as it was trained
  to: `mask` allows every token that begins what is forced, or that begins with it and is allowed to go on.
- In JSON at most 16 spaces and newlines may stand between two symbols, since a model that finds nothing to say could write
  them for ever. A schema's own "x-guidance" settings come first.

A vocabulary that has each single byte never gets stuck. One that has not may, and so may a grammar that grows beyond the
library's limits: then a matcher says why it has `failed`, and allows nothing but the end.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from whorl.engine.request import Grammar
from whorl.engine.sampling.forced_prefix import SortedVocabulary, TokenMask
from whorl.errors import ConfigError, DataError

JSON_DEFAULTS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,16}"}
MAX_CACHED_GRAMMARS = 64  # compiled grammars


class GrammarCompiler:
    """Makes matchers for one tokenizer.

    Args:
        token_bytes: of each id; empty for one that writes nothing (an id of control).
        end_ids: allowed where the output may end; their bytes are not looked at.
        size: V of the logits, if there are more ids than have bytes.

    Raises:
        ConfigError: llguidance is not installed; no end id, or one outside of the vocabulary.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], end_ids: Iterable[int], vocab_size: int | None = None
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "decoding under a grammar needs the package llguidance, which is not installed",
                do="pip install 'whorl[serve]'",
            ) from error
        self.end_ids = tuple(sorted(set(end_ids)))
        vocab_size = max(vocab_size or 0, len(token_bytes))
        if not self.end_ids or self.end_ids[0] < 0 or self.end_ids[-1] >= vocab_size:
            raise ConfigError(
                f"the end ids are {list(self.end_ids)}", expected=f"one at least, of 0 to {vocab_size - 1}"
            )
        texts = [*token_bytes, *[b""] * (vocab_size - len(token_bytes))]
        for number in self.end_ids:
            texts[number] = b""
        self.vocabulary = SortedVocabulary(texts)
        self._library: Any = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            _wrap_tokenizer(llguidance, self.vocabulary, self.end_ids),
            n_vocab=vocab_size,
            eos_token=list(self.end_ids),
        )
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of `grammar`.

        Raises:
            ConfigError: the grammar is none, or is beyond what the library can follow, or nothing can be written in it; says
                where.
        """
        found = self._compiled.pop(grammar, None)
        if found is None:
            what, text = _to_library_grammar(self._library.LLMatcher, grammar)
            limits = self._library.LLParserLimits(verbose_errors=False)
            found = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
            if found.is_error():
                raise ConfigError(
                    f"{what} cannot be followed: {found.get_error().strip()}",
                    expected="what llguidance understands",
                )
            if GrammarMatcher(self, found.deep_copy()).failed is not None:
                raise ConfigError(f"{what} allows no output that the vocabulary could write")
        self._compiled[grammar] = found
        if len(self._compiled) > MAX_CACHED_GRAMMARS:
            self._compiled.popitem(last=False)
        return GrammarMatcher(self, found.deep_copy())


class GrammarMatcher:
    """A place in a sentence of a grammar; a `Matcher`. Made by `GrammarCompiler.compile`."""

    def __init__(self, compiler: GrammarCompiler, state: Any, n_end_ids: int = 0) -> None:
        self.compiler, self._state = compiler, state
        self._n_end_ids = n_end_ids  # end ids taken in: the library does not count them
        self._failed: str | None = None
        self._mask: TokenMask | None = None  # of this place, once it was asked for

    @property
    def can_end(self) -> bool:
        return bool(self._n_end_ids or self._state.is_accepting())

    @property
    def ended(self) -> bool:
        return bool(self._n_end_ids or self._state.is_stopped() or self.failed is not None)

    @property
    def failed(self) -> str | None:
        """No token fits, or the grammar has grown beyond the library's limits."""
        self.mask()
        return self._failed

    def mask(self) -> TokenMask:
        """Ids that may come next, [V] bool or packed in int32: the end ids among them where the output may end, and only
        they where it must, or has failed.
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
        """The mask where the sentence may go on."""
        forced = self._state.compute_ff_bytes()
        if not forced:
            return np.frombuffer(self._state.compute_bitmask(), np.int32)
        vocabulary = self.compiler.vocabulary
        allowed = np.zeros(vocabulary.vocab_size, np.bool_)
        allowed[vocabulary.ids_of_proper_prefixes(forced)] = True
        further = vocabulary.ids_with_prefix(forced).tolist()
        allowed[[number for number in further if self._state.validate_tokens([number])]] = True
        return allowed

    def advance(self, token_id: int) -> None:
        """Takes in one id.

        Raises:
            DataError: it is not allowed here; the state is as before.
        """
        if token_id in self.compiler.end_ids:
            allowed = self.can_end
            self._n_end_ids += allowed
        else:
            allowed = not self._n_end_ids and bool(self._state.validate_tokens([token_id]))
            if allowed:
                self._state.consume_token(token_id)
        if not allowed:
            raise DataError(f"the grammar does not allow the id {token_id} here")
        self._mask = None

    def rollback(self, count: int) -> None:
        """Takes back the last `count` ids. A sentence that has failed stays so."""
        ends = min(count, self._n_end_ids)
        self._n_end_ids -= ends
        if count > ends:
            self._state.rollback(count - ends)
        self._mask = None

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self.compiler, self._state.deep_copy(), self._n_end_ids)


def _to_library_grammar(library: Any, grammar: Grammar) -> tuple[str, str]:
    """(its name for messages, the library's own form of it)."""
    if grammar.regex is not None:
        return "the regular expression", library.grammar_from_regex(grammar.regex)
    if grammar.lark is not None:
        return "the Lark grammar", library.grammar_from_lark(grammar.lark)
    try:
        schema = json.loads(grammar.json_schema or "")
    except ValueError as error:
        raise ConfigError(f"the JSON schema is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"the JSON schema is {str(schema)[:40]!r}", expected="an object")
    return "the JSON schema", library.grammar_from_json_schema(json.dumps(schema), defaults=JSON_DEFAULTS)


def _wrap_tokenizer(library: Any, vocabulary: SortedVocabulary, end_ids: Sequence[int]) -> Any:
    """The tokenizer in the library's form: silent ids are special ones, each by a name of its own."""
    texts = [text or f"<|{number}|>".encode() for number, text in enumerate(vocabulary.token_bytes)]

    class Wrapped(library.TokenizerWrapper):  # type: ignore[misc]
        is_tokenizer_wrapper = True
        eos_token_id, bos_token_id, tokens = end_ids[0], None, texts
        special_token_ids = tuple(n for n, text in enumerate(vocabulary.token_bytes) if not text)

        def __init__(self) -> None:
            pass

        def __call__(self, text: str | bytes) -> list[int]:
            """Any tokens that write `text`: asked for where bytes are forced, and then not used."""
            return vocabulary.encode_greedy(text.encode() if isinstance(text, str) else text)

    return Wrapped()
