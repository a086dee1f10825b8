"""`whorl watch`: changes of a folder or a table enter the log and its search index, until Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import StoreOption


def watch(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Folder, SQLite file, postgresql://... or mariadb://...")
    ],
    to: Annotated[str, typer.Option(metavar="NAME", help="Topic of the log, and index.")],
    table: Annotated[str, typer.Option(metavar="TABLE", help="Table of a database.")] = "",
    text: Annotated[str, typer.Option(metavar="COLUMN", help="Column of the text; needed for a table.")] = "",
    title: Annotated[str, typer.Option(metavar="COLUMN", help="Column of the title.")] = "",
    index: Annotated[
        str, typer.Option(metavar="URL", help="Index on a server: postgresql://..., opensearch://...")
    ] = "",
    embedder: Annotated[str, typer.Option(metavar="ARTIFACT", help="Also index vectors of passages.")] = "",
    once: Annotated[bool, typer.Option("--once", help="End when everything is indexed.")] = False,
    log: Annotated[
        str | None, typer.Option(metavar="URL", help="Log; else $WHORL_LOG, else the store's.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Capture what is saved in a folder, or committed to a table, into the log, and index it for `whorl search`.

    Killed and started again, it continues where it was: nothing is lost and nothing counts twice.

    Examples:

        whorl watch ~/notes --to notes

        whorl watch app.db --to docs --table docs --text body --title name

        whorl watch postgresql://localhost/shop --to items --table items --text description --once
    """
    from whorl.cli.serving.search import encoder_loader
    from whorl.errors import ConfigError
    from whorl.log import default_log, open_log
    from whorl.loop.capture.capture import Capture, run_capture
    from whorl.loop.capture.source import SourceOptions, open_source
    from whorl.loop.search.indexer import Indexer, run_indexer
    from whorl.store import Store
    from whorl.store.lock import FileLock

    opened = Store(store)
    folder, warn = Path(opened.root), partial(print, file=sys.stderr, flush=True)
    state, done, stop, last = folder / "capture" / to, threading.Event(), threading.Event(), ""
    state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(state / "capture.lock")
    if not lock.acquire():
        raise ConfigError(
            f"process {lock.owner().get('pid')} captures {to}", do="end it first, or give another --to"
        )
    with ExitStack() as stack:
        stack.callback(lock.release)
        topics = stack.enter_context(open_log(log or default_log(folder)))
        thread = stack.enter_context(ThreadPoolExecutor(1))
        options = SourceOptions(source, table, to, state, lambda: (r.event() for r in topics.replay(to)))
        with open_source(options) as found:
            address = opened.open(embedder).address if embedder else ""
            _settle(
                folder, to, bool(table), text=text, title=title, index=index, encoder=address, log=log or ""
            )
            capture = Capture(found, topics, to, warn)

            def report(lag: int) -> None:
                nonlocal last
                line = f"{to}: {capture.changes:,} changes, {capture.rejected:,} rejected, {lag:,} not yet indexed"
                if line != last:
                    print(line, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
                last = line

            def run_index() -> None:
                try:
                    run_indexer(lambda: Indexer(folder, to, encoder_loader(opened)), done, stop, report, warn)
                finally:
                    stop.set()

            signal.signal(signal.SIGTERM, lambda *_: stop.set())
            indexing = thread.submit(run_index)
            try:
                run_capture(capture, stop, once)
                done.set()
                indexing.result()
            finally:
                stop.set()


def _settle(store: Path, name: str, is_table: bool, **given: str) -> None:
    """Save the settings of a new index. Raises ConfigError: they differ from those of the index, or lack the text."""
    from whorl.errors import ConfigError
    from whorl.loop.search.settings import SearchSettings, load_settings, save_settings
    from whorl.search.index import index_scheme

    given = {field: value for field, value in given.items() if value}
    if not (store / "search" / name / "settings.json").exists():
        if is_table and "text" not in given:
            raise ConfigError("a table needs --text COLUMN", expected="the column that is searched")
        index_scheme(given.get("index", ""))
        save_settings(store, name, SearchSettings.model_validate({"topic": name, **given}))
    settings = load_settings(store, name).model_dump()
    for field, value in given.items():
        if settings[field] != value:
            problem = f"the index {name} has {field} {settings[field]!r}, not {value!r}"
            raise ConfigError(problem, do="give another --to, or leave the option out")
