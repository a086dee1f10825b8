"""`whorl loop`: fold the log into its views, until it is stopped."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import StoreOption

EXPORT_SECONDS = 60.0


def loop(
    log: Annotated[
        str | None, typer.Option(metavar="URL", help="Log; else $WHORL_LOG, else the store's.")
    ] = None,
    views: Annotated[
        str | None, typer.Option(metavar="URL", help="Store of the views: sqlite:FILE or postgresql://...")
    ] = None,
    cache: Annotated[str, typer.Option(metavar="URL", help="Cache of counts: redis://HOST.")] = "",
    once: Annotated[bool, typer.Option("--once", help="End when everything is read.")] = False,
    rebuild: Annotated[
        list[str] | None, typer.Option(metavar="VIEW", help="Delete a view and fold it again from the start.")
    ] = None,
    reconcile: Annotated[
        bool, typer.Option("--reconcile", help="Count again from the memberships, repair what differs, end.")
    ] = False,
    warehouse: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the events as Parquet, each minute.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Fold the events of a log into views: counts of likes, the feed, raters.

    Several may run on one log: they share its partitions, and when one dies the others continue. A view can always be
    deleted and folded again.

    Examples:

        whorl loop

        whorl loop --once --rebuild likes
    """
    from whorl.errors import ConfigError, one_of
    from whorl.log import default_log, open_log
    from whorl.loop.counter import VIEWS
    from whorl.loop.counter.cache import open_cache
    from whorl.loop.counter.reconciliation import reconcile_counts
    from whorl.loop.counter.warehouse import export_events
    from whorl.loop.events import create_topics
    from whorl.loop.streams.runner import run_views
    from whorl.loop.streams.store import ViewStore, default_views
    from whorl.store import Store

    folder = Store(store).root
    log_url, views_url = log or default_log(folder), views or default_views(folder)
    for name in rebuild or ():
        view = {view.name: view for view in VIEWS}.get(name)
        if view is None:
            raise ConfigError(f"there is no view {name!r}", expected=one_of(name, [v.name for v in VIEWS]))
        with open_log(log_url) as opened, ViewStore(views_url) as rows:
            create_topics(opened)
            rows.reset(name, {(t, p): b.first for t in view.topics for p, b in enumerate(opened.bounds(t))})
    counts = open_cache(cache)
    if reconcile:
        with ViewStore(views_url) as rows:
            found = reconcile_counts(rows, counts)
        for answer, (stored, counted) in found.wrong.items():
            print(f"{answer}: {stored} was stored, {counted} are there")
        print(
            f"{found.answers:,} counts, {len(found.wrong):,} repaired, {len(found.stale):,} of the cache refreshed"
        )
        return
    stop, export_at = threading.Event(), 0.0
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    live, last = sys.stderr.isatty(), ""

    def export() -> None:
        if warehouse is not None:
            with open_log(log_url) as opened:
                export_events(opened, warehouse)

    def report(lags: Mapping[str, int]) -> None:
        nonlocal last, export_at
        if time.monotonic() >= export_at:
            export()
            export_at = time.monotonic() + EXPORT_SECONDS
        line = "behind: " + ", ".join(f"{name} {lag:,}" for name, lag in lags.items())
        if line != last:
            print(line, end="\r" if live else "\n", file=sys.stderr, flush=True)
        last = line

    run_views(
        [*VIEWS], log_url, views_url, perform=counts.perform, stop=stop, once=once,
        report=report, warn=partial(print, file=sys.stderr, flush=True),
    )  # fmt: skip
    export()
