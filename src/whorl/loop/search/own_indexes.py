"""Indexes without `whorl watch`: `corpus`, `runs` (the artifacts of a store) and `responses` (kept completions)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from whorl.corpus.reader import document_files
from whorl.errors import DataError
from whorl.log.event import Event
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.events import COMPLETIONS, FEEDBACK
from whorl.loop.search.documents import DOCUMENTS, DocumentsView, Row
from whorl.loop.search.passages import Enrichment, LoadEncoder, VectorCache
from whorl.loop.search.settings import SearchSettings, index_url, load_settings, save_settings
from whorl.loop.streams.view import END, ViewEffect, ViewItem, ViewState
from whorl.search.index import open_index, remove_index
from whorl.store import Store

ACTORS, BETWEEN = "actors", "\x1f"
CHUNK = 500  # rows of one write
SHOWN = ["id", "title", "text", "source", "path", "licence", "language", "url"]


class ResponsesView(DocumentsView):
    """Completions that users let the server keep. Those of an erased actor are deleted. Table "actors": actor and id."""

    def __init__(self, name: str, keys: ActorKeys) -> None:
        super().__init__(name, COMPLETIONS, (FEEDBACK,))
        self.keys = keys

    def read(self, event: Event) -> tuple[str, Row | None, bool] | None:
        if event.type == "actor.erased":
            return event.key, None, False
        if event.type != "completion.made":
            return None
        data = self.keys.open(event)
        return event.key, data and _response_row(data), False

    def apply(self, state: ViewState, items: Sequence[ViewItem]) -> Sequence[ViewEffect]:
        made = [item for item in items if item.record.topic == COMPLETIONS]
        super().apply(state, made)
        for key, row in ((item.value[0], item.value[1]) for item in made):
            if row is not None:
                state.put(ACTORS, f"{row['actor']}{BETWEEN}{key}", 1)
        for item in (item for item in items if item.record.topic == FEEDBACK):
            begin = item.value[0] + BETWEEN
            for name in state.scan(ACTORS, begin, begin + END):
                entry = state.get(DOCUMENTS, name.removeprefix(begin))
                erased = {COMPLETIONS: [entry[COMPLETIONS][0], None], FEEDBACK: [item.record.offset, None]}
                state.put(DOCUMENTS, name.removeprefix(begin), erased)
        return ()


@contextmanager
def view_of(name: str, store: Path, settings: SearchSettings) -> Iterator[DocumentsView]:
    """Yield the view of an index."""
    if settings.topic != COMPLETIONS:
        yield DocumentsView(name, settings.topic, settings.joins)
        return
    with closing(ActorKeys(store / "log" / "keys.db")) as keys:
        yield ResponsesView(name, keys)


def _response_row(data: Mapping[str, Any]) -> Row:
    prompt = data["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(str(message.get("content") or "") for message in prompt)
    text = "\n\n".join([prompt, *(choice["text"] for choice in data["choices"])])
    return {"text": text, "model": data["model"], "actor": data["actor"]}


def corpus_rows(store: Store) -> Iterator[tuple[str, Row]]:
    """Yield id and row of the documents of the newest `ingest`. Raises DataError: the store has no corpus."""
    import pyarrow.parquet as pq

    found = [artifact for artifact in store.artifacts() if artifact.kind == "ingest"]
    if not found:
        raise DataError(f"the store {store.location} has no corpus", do="whorl corpus ingest, or whorl run")
    for path in document_files(found[-1].path):
        for batch in pq.ParquetFile(path).iter_batches(1000, columns=SHOWN):
            yield from ((row.pop("id"), row) for row in batch.to_pylist())


def artifact_rows(store: Store) -> Iterator[tuple[str, Row]]:
    """Yield address and row of the artifacts."""
    for each in store.artifacts():
        text = "\n".join([each.summary.get("headline", ""), orjson.dumps(each.config, default=str).decode()])
        yield each.address, {"title": each.name, "text": text, "kind": each.kind, "created": each.created}


# name -> kind of the artifacts that it follows ("": all), and their rows
ROWS: Mapping[str, tuple[str, Callable[[Store], Iterator[tuple[str, Row]]]]] = {
    "corpus": ("ingest", corpus_rows),
    "runs": ("", artifact_rows),
}


def sync_index(
    store: Store, name: str, load_encoder: LoadEncoder, encoder: str = "", rebuild: bool = False
) -> bool:
    """Make an index of this module, unless a user made one of its name; return whether it is one of rows, now equal to them.

    Other rows, or another encoder, fill a new generation, to which the settings switch at the end.
    """
    root = Path(store.root)
    if name in (*ROWS, "responses") and not (root / "search" / name / "settings.json").exists():
        save_settings(root, name, SearchSettings(topic="" if name in ROWS else COMPLETIONS))
    settings = load_settings(root, name)
    if settings.topic or name not in ROWS:
        return False
    kind, rows_of = ROWS[name]
    newest = {each.address: 1 for each in store.artifacts() if kind in ("", each.kind)}
    changes = {"generation": settings.generation + 1, "encoder": encoder or settings.encoder}
    fresh, rows = settings.model_copy(update=changes), rows_of(store)
    with open_index(index_url(root, name, settings), writable=True) as old:
        if not rebuild and fresh.encoder == settings.encoder and newest and old.position() == newest:
            return True
    remove_index(index_url(root, name, fresh))
    with ExitStack() as stack:
        index = stack.enter_context(open_index(index_url(root, name, fresh), writable=True))
        cache = VectorCache(root / "search" / "vectors.db", {e: load_encoder(e) for e in fresh.encoders})
        stack.callback(cache.close)
        while some := dict(islice(rows, CHUNK)):
            entries = {key: {"": [0, row]} for key, row in some.items()}
            index.write(*Enrichment(fresh, cache).documents(entries))
        index.write([], [], newest)
    save_settings(root, name, fresh)
    remove_index(index_url(root, name, settings))
    return True
