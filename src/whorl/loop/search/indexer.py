"""The indexer of an index: rows and offsets of the fold in one transaction, then the index.

The transaction also stores which documents it changed. They are written to the index after it, and once more after a crash
in between. That is harmless: an index ignores older versions, and an equal one replaces itself.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from whorl.log.groups import Partition
from whorl.log.locations import default_log, open_log
from whorl.log.port import LogUnavailableError
from whorl.loop.events import create_topics
from whorl.loop.search.documents import DOCUMENTS
from whorl.loop.search.own_indexes import view_of
from whorl.loop.search.passages import Enrichment, LoadEncoder, VectorCache
from whorl.loop.search.settings import index_url, load_settings, save_settings
from whorl.loop.streams.runner import lag_of
from whorl.loop.streams.store import ViewStore, ViewsUnavailableError
from whorl.loop.streams.view import ViewState
from whorl.loop.streams.worker import ViewWorker
from whorl.search.documents import IndexBusyError, IndexUnavailableError
from whorl.search.index import Index, open_index, remove_index
from whorl.store.lock import FileLock

BATCH, FILL = 1000, 200  # records of one write; documents of one step of a fill
TOMBSTONE_SECONDS = 600.0
REFRESH_SECONDS = 0.5  # between writes of an indexer that has read everything
RETRY_SECONDS = 0.25


class IndexStore(ViewStore):
    """A store of views whose table "documents" is also in an index."""

    def __init__(self, url: str, index: Index, enrichment: Enrichment) -> None:
        super().__init__(url)
        self.index, self.enrichment = index, enrichment
        self.clock: Callable[[], float] = time.monotonic
        self._marked, self._mark = self.clock(), 0

    def take(self, view: str, first: Mapping[Partition, int]) -> dict[Partition, tuple[int, int]]:
        taken = super().take(view, first)
        self.flush(view)
        return taken

    @contextmanager
    def batch(
        self, view: str, moves: Mapping[Partition, tuple[int, int]], epochs: Mapping[Partition, int],
        partitions: Sequence[Partition] = (),
    ) -> Iterator[ViewState]:  # fmt: skip
        with super().batch(view, moves, epochs, partitions) as state:
            yield state
            state.put("pending", "", [key for table, key in state.written if table == DOCUMENTS])
        self.flush(view)

    def flush(self, view: str) -> None:
        """Write the documents of the last transaction to the index, with the offsets.

        A write that a server received from a dead indexer may be applied late. So the version of a deletion is kept for at
        least `TOMBSTONE_SECONDS`, until the offsets of all partitions are beyond it.
        """
        keys = self.load(view, "pending", [""]).get("", [])
        position = {f"{topic}/{number}": end for (topic, number), (end, _) in self.offsets(view).items()}
        puts, deletes = self.enrichment.documents(self.load(view, DOCUMENTS, keys))
        due, expire = self.clock() >= self._marked + TOMBSTONE_SECONDS, self._mark
        self.index.write(puts, deletes, position, expire if due else 0)
        if due:
            self._marked, self._mark = self.clock(), min(position.values(), default=0)

    def fill(self, view: str, limit: int) -> bool:
        """Write further documents again, with the vectors of all encoders; return whether any was left."""
        (after,) = self.load(view, "filled", [self.enrichment.settings.filling]).values() or ("",)
        query = "SELECT key FROM view_rows WHERE view = %s AND name = %s AND key > %s ORDER BY key LIMIT %s"
        keys = [key for (key,) in self.execute(query, (view, DOCUMENTS, after, limit))]
        if keys:
            self.index.write(*self.enrichment.documents(self.load(view, DOCUMENTS, keys)))
            with self.transaction():
                state = ViewState(self, view)
                state.put("filled", self.enrichment.settings.filling, keys[-1])
                self.write(view, state)
        return bool(keys)


class Indexer:
    """The one writer of an index. A context manager. rebuild: it writes the next generation.

    Raises:
        ConfigError: no such index. IndexBusyError: another process writes it. DataError: its log is another one.
    """

    def __init__(
        self, store: Path, name: str, load_encoder: LoadEncoder | None = None, rebuild: bool = False
    ) -> None:  # fmt: skip
        self._place, self._saved = (store, name), load_settings(store, name)
        settings = self.settings = self._saved.model_copy(
            update={"generation": self._saved.generation + rebuild}
        )
        folder = store / "search" / name / str(settings.generation)
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            lock = FileLock(folder / "writer.lock")
            if not lock.acquire():
                raise IndexBusyError(
                    f"process {lock.owner().get('pid')} writes the index {name}", expected="one writer"
                )
            stack.callback(lock.release)
            self.log = stack.enter_context(open_log(settings.log or default_log(store)))
            create_topics(self.log)
            encoders = {address: load_encoder(address) for address in settings.encoders if load_encoder}
            cache = VectorCache(store / "search" / "vectors.db", encoders)
            stack.callback(cache.close)
            index = open_index(index_url(store, name, settings), writable=True)
            stack.callback(index.close)
            self.view = stack.enter_context(view_of(f"search/{name}/{settings.generation}", store, settings))
            rows = f"sqlite:{folder / 'rows.db'}"
            self.store = stack.enter_context(IndexStore(rows, index, Enrichment(settings, cache)))
            self._stack = stack.pop_all()

    def steps(self) -> Iterator[str]:
        """Do the work, and yield the name of what was done: "idle" where nothing was left to read.

        Ends when the settings have changed: open another one.
        """
        worker = ViewWorker(self.view, self.log, self.store, limit=BATCH)
        worker.reader.member = (
            "the indexer"  # one at a time, so a successor need not wait for the end of a session
        )
        try:
            for point in worker.steps():
                yield point
                if self.settings.filling and point in ("performed", "idle"):
                    if not self.store.fill(self.view.name, FILL):
                        self._change(encoder=self.settings.filling, filling="")
                    yield "filled"
                if load_settings(*self._place) != self._saved:
                    return
        finally:
            worker.close()

    def lag(self) -> int:
        """Return the records that are not in the index yet."""
        return lag_of(self.view, self.log, self.store)

    def catch_up(self) -> bool:
        """Index what the log has now; return whether that is done, or the settings have changed before."""
        return any(
            point == "idle" and not self.settings.filling and self.lag() == 0 for point in self.steps()
        )

    def switch(self) -> None:
        """Make the rebuilt generation the current one."""
        self._change(generation=self.settings.generation)

    def _change(self, **fields: Any) -> None:
        save_settings(*self._place, load_settings(*self._place).model_copy(update=fields))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Indexer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run_indexer(
    open_indexer: Callable[[], Indexer], done: threading.Event, stop: threading.Event,
    report: Callable[[int], None] = lambda lag: None, warn: Callable[[str], None] = lambda text: None,
) -> None:  # fmt: skip
    """Index until `stop` is set, or until the index has all records that were there after `done` was set.

    Another writer, and a log or store that is away, are waited for. report: gets the lag where nothing was left to read.
    """
    waiting, due = False, 0.0  # when the next write begins
    while not stop.is_set():
        try:
            with open_indexer() as indexer:
                for point in indexer.steps():
                    if point == "idle":
                        last = done.is_set()
                        report(lag := indexer.lag())
                        if last and not lag and not indexer.settings.filling:
                            return
                        done.wait(0 if last else max(0.0, due - time.monotonic()))
                        due = time.monotonic() + REFRESH_SECONDS
                    if stop.is_set():
                        return
        except (IndexBusyError, IndexUnavailableError, LogUnavailableError, ViewsUnavailableError) as error:
            if not waiting:
                warn(f"the indexer waits: {error}")
            waiting = True
            stop.wait(RETRY_SECONDS)


def catch_up(store: Path, name: str, load_encoder: LoadEncoder | None = None) -> None:
    """Index what the log of an index has now. Raises as `Indexer`."""
    while True:
        with Indexer(store, name, load_encoder) as indexer:
            if indexer.catch_up():
                return


def rebuild_index(store: Path, name: str, load_encoder: LoadEncoder | None = None) -> None:
    """Fold the log again into a new generation, while others search and write the old one; then switch in one step.

    The new one has then read as far as the old one. The generation before the old one is removed.
    """
    while True:
        settings, folder = load_settings(store, name), store / "search" / name
        for other in {settings.generation - 1, settings.generation + 1}:
            remove_index(index_url(store, name, settings.model_copy(update={"generation": other})))
            shutil.rmtree(folder / str(other), ignore_errors=True)
        with Indexer(store, name, load_encoder, rebuild=True) as fresh:
            while fresh.catch_up():
                with open_index(index_url(store, name, settings)) as old:
                    behind = {
                        p for p, n in old.position().items() if n > fresh.store.index.position().get(p, 0)
                    }
                if not behind:
                    fresh.switch()
                    return
