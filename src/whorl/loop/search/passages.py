"""Passages of documents, and what is added to them outside of queries: vectors, language, licence."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from whorl.corpus.measures.language import language_of
from whorl.corpus.provenance.licences import SPDX
from whorl.errors import ConfigError, DataError
from whorl.loop.search.documents import Entry, content_of, version_of
from whorl.loop.search.settings import SearchSettings
from whorl.search.documents import Encode, Passage, SearchDocument, Vectors, content_digest

LoadEncoder = Callable[[str], Encode]  # by the address of the artifact
HEAD = 4000  # characters that language and licence are read from
_ENDS = [
    re.compile(p) for p in (r"\n\s*\n", r"\n", r"[.!?]\s+", r"\s+")
]  # where a passage may end, best first


def cut(text: str, length: int) -> list[tuple[int, str]]:
    """Return (start, text) of passages of at most `length` characters, which are the text when joined."""
    found, start = list[tuple[int, str]](), 0
    while len(text) - start > length:
        window = text[start : start + length]
        ends = ([m.end() for m in pattern.finditer(window, length // 2)] for pattern in _ENDS)
        end = start + next((some[-1] for some in ends if some), length)
        found.append((start, text[start:end]))
        start = end
    return [*found, (start, text[start:])]


class VectorCache:
    """Vectors in a SQLite file, by the address of their encoder and a hash of their text. encoders: address -> `Encode`."""

    def __init__(self, path: Path | str, encoders: Mapping[str, Encode]) -> None:
        self.encoders = encoders
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self._database.executescript(
            "PRAGMA journal_mode=WAL; CREATE TABLE IF NOT EXISTS vectors"
            " (encoder TEXT, digest BLOB, vector BLOB, PRIMARY KEY (encoder, digest)) WITHOUT ROWID"
        )

    def vectors(self, encoder: str, texts: Sequence[str]) -> list[Vectors]:
        """Return the vector [d] of each text. Raises DataError: the encoder returned another number or dimension."""
        keys = [xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass")) for text in texts]
        query = "SELECT digest, vector FROM vectors WHERE encoder = ? AND digest = ?"
        found = (self._database.execute(query, (encoder, key)).fetchone() for key in {*keys})
        known: dict[bytes, bytes] = dict(row for row in found if row is not None)
        if missing := {key: text for key, text in zip(keys, texts, strict=True) if key not in known}:
            if encoder not in self.encoders:
                raise ConfigError(f"the index has vectors of {encoder}", expected="its embedder")
            made = np.ascontiguousarray(self.encoders[encoder]([*missing.values()]), np.float32)
            if made.ndim != 2 or len(made) != len(missing):
                raise DataError(
                    f"the embedder {encoder} returned {made.shape}", expected=f"({len(missing)}, d)"
                )
            fresh = {key: vector.tobytes() for key, vector in zip(missing, made, strict=True)}
            rows = [(encoder, *pair) for pair in fresh.items()]
            self._database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", rows)
            known |= fresh
        return [np.frombuffer(known[key], np.float32) for key in keys]

    def close(self) -> None:
        self._database.close()


@dataclass(frozen=True)
class Enrichment:
    """Makes documents of the entries of `DocumentsView`."""

    settings: SearchSettings
    cache: VectorCache

    def documents(
        self, entries: Mapping[str, Entry]
    ) -> tuple[list[SearchDocument], list[tuple[str, int]]]:  # fmt: skip
        """Return what to put, and (id, version) to delete."""
        topic = self.settings.topic
        rows = {key: entry.get(topic, (0, None))[1] for key, entry in entries.items()}
        deletes = [(k, version_of(entries[k], topic)) for k, row in rows.items() if row is None]
        drafts = [self._draft(k, entries[k]) for k, row in rows.items() if row is not None]
        passages = [
            (n, *part) for n, (_, text) in enumerate(drafts) for part in cut(text, self.settings.passage)
        ]
        texts = [f"{drafts[number][0].title}\n{text}".strip() for number, _, text in passages]
        filled = [text for text in texts if text]
        columns = {name: iter(self.cache.vectors(name, filled)) for name in self.settings.encoders if filled}
        made = list[list[Passage]]([] for _ in drafts)
        for (number, start, text), embedded in zip(passages, texts, strict=True):
            vectors = {name: next(each) for name, each in columns.items()} if embedded else {}
            made[number].append(Passage(start, text, vectors))
        puts = [replace(draft, passages=some) for (draft, _), some in zip(drafts, made, strict=True)]
        return puts, deletes

    def _draft(self, key: str, entry: Entry) -> tuple[SearchDocument, str]:
        """Return the document without its passages, and its text."""
        s = self.settings
        joined = {name: v for topic in s.joins for name, v in (entry.get(topic, (0, None))[1] or {}).items()}
        title, text, fields = content_of(joined | entry[s.topic][1], s.text, s.title, s.fields)
        digest, head = content_digest(title, text, fields), text[:HEAD]
        if "language" not in fields and (language := language_of(head)):
            fields["language"] = language
        if "licence" not in fields and (licence := SPDX.search(head)):
            fields["licence"] = licence[1].strip()
        return SearchDocument(key, version_of(entry, s.topic), (), title, fields, digest), text
