"""The oracle of the conformance suite: an index of dictionaries that looks at every document."""

from __future__ import annotations

import re
from collections import Counter

from whorl.search.documents import SearchHit, SearchResults


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class MemoryIndex:
    """Words are exact. Texts are ranked by the number of different query words, then by all of their occurrences."""

    def __init__(self):
        self.kept, self.places = {}, {}  # id -> (version, document or None)

    def write(self, puts, deletes=(), position=None, expire=0):
        changes = [(p.id, p.version, p) for p in puts] + [(id, version, None) for id, version in deletes]
        for id, version, document in changes:
            if self.replaces(version, self.kept.get(id, (-1,))[0]):
                self.kept[id] = version, document
        for place, offset in (position or {}).items():
            self.places[place] = max(offset, self.places.get(place, 0))
        self.kept = {id: (v, d) for id, (v, d) in self.kept.items() if d is not None or v >= expire}

    def replaces(self, version, known):
        return version >= known

    def position(self):
        return dict(self.places)

    def versions(self, ids):
        return {id: (v, d.digest if d else "") for id in ids if id in self.kept for v, d in [self.kept[id]]}

    def documents(self):
        yield from ((id, v, d.digest) for id, (v, d) in self.kept.items() if d is not None)

    def search(self, query):
        phrases = [words(phrase) for phrase in re.findall(r'(?<!-)"(.*?)"', query.text)]
        rest = re.sub(r'"(.*?)"', " ", query.text)
        excluded = {word for part in re.findall(r"(?:^|\s)-(\S+)", rest) for word in words(part)}
        wanted = set(words(re.sub(r"(?:^|\s)-\S+", " ", rest)))
        hits, fields = [], []
        for id, (version, document) in self.kept.items():
            if document is None or not fits(document, query.filters):
                continue
            whole = words(document.title) + [w for p in document.passages for w in words(p.text)]
            scored = []
            for passage in document.passages:
                found = words(document.title) + words(passage.text)
                counts = Counter(w for w in found if w in wanted)
                in_phrase = all(any(found[i : i + len(p)] == p for i in range(len(found))) for p in phrases)
                if excluded & set(whole) or not in_phrase or not (counts or phrases):
                    continue
                scored.append((len(counts) + counts.total() / 1000, passage))
            if scored:
                score, passage = max(scored, key=lambda pair: pair[0])
                hits.append(
                    SearchHit(
                        id, version, score, passage.start, passage.text, document.title, document.fields
                    )
                )
                fields.append(document.fields)
        facets = {
            name: dict(Counter(v for f in fields for v in values(f.get(name)))) for name in query.facets
        }
        best = sorted(hits, key=lambda hit: (-hit.score, hit.id))[: query.k]
        return SearchResults(best, len(hits), facets)

    def fields(self):
        return sorted({name for _, d in self.kept.values() if d for name in d.fields})

    def analyze(self, text):
        return [("words", words(text))]

    def remove(self):
        self.kept, self.places = {}, {}

    def close(self):
        pass


def values(value) -> list[str]:
    return [] if value is None else [str(v) for v in (value if isinstance(value, list) else [value])]


def fits(document, filters) -> bool:
    for name, wanted in filters.items():
        found = document.fields.get(name)
        if isinstance(wanted, tuple):
            low, high = wanted
            if found is None or not (low is None or found >= low) or not (high is None or found <= high):
                return False
        else:
            some = wanted if isinstance(wanted, list) else [wanted]
            if not set(values(found)) & {str(one) for one in some}:
                return False
    return True
