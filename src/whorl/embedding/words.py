"""Words in place of text: what an embedder of a search index over code reads.

    parseDate(text), parse_date, Parse a date   ->   "parse date text", "parse date", "parse a date"

An identifier and a sentence share no ids of a tokenizer, although they share words. `words_of` is the analysis of the text
index (`search/analysis.py`) without stems, so both sides of a hybrid query see the same words.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from whorl.search.analysis import Analysis
from whorl.tokens.shards import TokenSplit
from whorl.tokens.tokenizer import Ids, Tokenizer


@lru_cache(1)
def _analysis() -> Analysis:
    return Analysis()


def words_of(text: str | bytes) -> str:
    """Return the words of a text; of a text without words, the text."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return " ".join(_analysis().words(text)) or text


class WordsTokenizer(Tokenizer):
    """A tokenizer that encodes the words of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.__dict__.update(tokenizer.__dict__)

    def encode(self, data: str | bytes, *, allow_special: bool = False) -> Ids:
        """Return the ids of the words of `data`."""
        return super().encode(words_of(data), allow_special=allow_special)


class WordsSplit:
    """A split of a token set whose documents are encoded again as words, in memory. Names are those of `TokenSplit`."""

    def __init__(self, split: TokenSplit, tokenizer: Tokenizer) -> None:
        whole = (split[s : s + n] for s, n in zip(split.starts.tolist(), split.lengths.tolist(), strict=True))
        texts = [tokenizer.decode(ids[1:-1]) for ids in whole]
        parts = WordsTokenizer(tokenizer).encode_batch(texts)
        self.fingerprint, self.n_documents = split.fingerprint, split.n_documents
        # As if each document had bos and eos, which no span has: `SpanPairs` leaves both out.
        self.lengths = np.array([len(ids) + 2 for ids in parts], np.int64)
        self.starts = np.cumsum(self.lengths - 2) - self.lengths + 1
        self._ids = np.concatenate([*parts, np.empty(0, tokenizer.dtype)])

    def __getitem__(self, where: slice) -> Ids:
        return self._ids[where]
