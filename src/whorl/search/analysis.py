"""How text becomes terms, for documents and for queries.

split        words, and the parts of identifiers: parseDate, parse_date, PARSE-DATE -> parse, date; a character each
             in scripts without spaces
lowercase    and accents removed: Größe -> grosse
typos        of a query: a word of which no document has the stem becomes the most frequent one that is near
stem         Snowball (https://snowballstem.org): parsing, parsed -> pars
synonyms     of a query, from a file, so that a change of the file needs no new index
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import tantivy

from whorl.errors import ConfigError

KEPT = 100_000  # stems in memory
LANGUAGE = "english"  # of the stemmer
WORD = re.compile(r"[^\W_]+")
_PART = re.compile(r"[A-Z](?:(?<=[a-z0-9].)|(?<=[A-Z].)(?=[a-z]))")
_NO_SPACES = re.compile("[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]")


def split(text: str) -> str:
    """Return a text with spaces within identifiers and around characters of scripts without spaces."""
    text = _PART.sub(r" \g<0>", text)
    return text if text.isascii() else _NO_SPACES.sub(r" \g<0> ", text)


@dataclass(frozen=True)
class Analysis:
    """See the top of this file. synonyms: word -> words that are searched too."""

    synonyms: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def stemmer(self) -> tantivy.TextAnalyzer:
        """The analyzer of texts after `split`."""
        return self._builder().filter(tantivy.Filter.stemmer(LANGUAGE)).build()

    @cached_property
    def stem(self) -> Callable[[str], str]:
        """The stem of a word."""
        return lru_cache(KEPT)(lambda word: "".join(self.stemmer.analyze(word)))

    @cached_property
    def plain(self) -> tantivy.TextAnalyzer:
        return self._builder().build()

    @staticmethod
    def _builder() -> tantivy.TextAnalyzerBuilder:
        simple = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
        return simple.filter(tantivy.Filter.lowercase()).filter(tantivy.Filter.ascii_fold())

    def words(self, text: str) -> list[str]:
        """Return the words of a text, without stems."""
        return list(self.plain.analyze(split(text)))

    def terms(self, text: str) -> list[str]:
        """Return the stems of the words of a text."""
        return list(self.stemmer.analyze(split(text)))


def read_synonyms(path: Path) -> dict[str, list[str]]:
    """Return word -> its synonyms. The file, which may be absent, has a group of words on each line; # begins a comment.

    Raises:
        ConfigError: a line holds one word.
    """
    found: dict[str, list[str]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        words = [word.strip().lower() for word in line.partition("#")[0].split(",") if word.strip()]
        if len(words) == 1:
            raise ConfigError(f"{path}, line {number}: {words[0]!r} is alone", expected="car, auto, vehicle")
        for word in words:
            found.setdefault(word, []).extend(other for other in words if other != word)
    return found
