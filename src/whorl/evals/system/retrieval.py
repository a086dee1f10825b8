"""Documents that match a question, by BM25 over words.

    score(d) = sum over words w of the question of  idf(w) f / (f + k1 (1 - b + b |d| / mean |d|)),   f = count of w in d
    idf(w)   = ln(1 + (N - n_w + 1/2) / (n_w + 1/2)),   n_w = documents with w

k1 = 1.2 and b = 0.75, after Robertson and Zaragoza 2009, doi:10.1561/1500000019, section 3. Documents of equal score keep
their order, so results do not depend on anything but the documents.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class Bm25Index:
    """An index of documents in memory. documents: texts."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = list(documents)
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = []
        for number, text in enumerate(self.documents):
            words = _words(text)
            lengths.append(len(words))
            for word, n in Counter(words).items():
                self._postings[word].append((number, n))
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._norms = [K1 * (1 - B + B * n / mean) for n in lengths]

    def search(self, question: str, k: int) -> list[tuple[int, float]]:
        """Return (number, score) of the k best documents that share a word with the question, the best first."""
        scores: dict[int, float] = defaultdict(float)
        n_documents = len(self.documents)
        for word in dict.fromkeys(_words(question)):
            postings = self._postings.get(word, [])
            idf = math.log(1 + (n_documents - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, n in postings:
                scores[number] += idf * n / (n + self._norms[number])
        return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:k]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
