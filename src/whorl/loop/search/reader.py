"""A search index as its readers see it: the current generation, with the embedder of its vectors."""

from __future__ import annotations

from pathlib import Path

from whorl.log.locations import default_log, open_log
from whorl.loop.search.passages import LoadEncoder
from whorl.loop.search.settings import SearchSettings, index_url, load_settings
from whorl.search.analysis import Analysis, read_synonyms
from whorl.search.documents import SearchQuery, SearchResults
from whorl.search.index import Index, open_index


class SearchReader:
    """An index by name, opened again when its settings or its file `synonyms.txt` change. A context manager.

    Raises:
        ConfigError: no such index.
    """

    def __init__(self, store: Path, name: str, load_encoder: LoadEncoder | None = None) -> None:
        self.store, self.name, self._load = store, name, load_encoder
        self._index: Index | None = None
        self._state: tuple[SearchSettings, dict[str, list[str]]] | None = None
        self.index()

    def index(self) -> Index:
        """Return the index of the current settings."""
        settings = load_settings(self.store, self.name)
        synonyms = read_synonyms(self.store / "search" / self.name / "synonyms.txt")
        if self._index is None or (settings, synonyms) != self._state:
            self.close()
            encoder = settings.encoder if self._load else ""
            self._index = open_index(
                index_url(self.store, self.name, settings), encoder=encoder, analysis=Analysis(synonyms=synonyms),
                encode=self._load(encoder) if self._load and encoder else None,
            )  # fmt: skip
            self._state = settings, synonyms
        return self._index

    def search(self, query: SearchQuery) -> SearchResults:
        """Return what fits best. Raises QueryError."""
        return self.index().search(query)

    def lag(self) -> int:
        """Return the records of the log that are not in the index yet."""
        done, settings = self.index().position(), load_settings(self.store, self.name)
        with open_log(settings.log or default_log(self.store)) as opened:
            return sum(
                bound.next - max(bound.first, done.get(f"{topic}/{number}", 0))
                for topic in (settings.topic, *settings.joins)
                for number, bound in enumerate(opened.bounds(topic))
            )

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None

    def __enter__(self) -> SearchReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
