"""`whorl loop`: fold the log into its views, until it is stopped."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping
from typing import Annotated

import typer

from whorl.cli.options import StoreOption


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
    store: StoreOption = None,
) -> None:
    """Fold the events of a log into views: counts of likes, the feed, raters.

    Several may run on one log: they share its partitions, and when one dies the others continue. A view can always be
    deleted and folded again.

    Examples:

        whorl loop

        whorl loop --once --rebuild likes
    """
    from whorl.log import default_log, open_log
    from whorl.loop.counter.cache import open_cache
    from whorl.loop.counter.views import VIEWS, views_named
    from whorl.loop.events import create_topics
    from whorl.loop.streams import default_views, open_views
    from whorl.loop.streams.runner import run_views
    from whorl.store import Store

    folder = Store(store).location
    log_url, views_url = log or default_log(folder), views or default_views(folder)
    if rebuild:
        with open_log(log_url) as opened, open_views(views_url) as rows:
            create_topics(opened)
            for view in views_named(rebuild):
                bounds = {(t, p): b.first for t in view.topics for p, b in enumerate(opened.bounds(t))}
                rows.reset(view.name, bounds)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    live, last = sys.stderr.isatty(), ""

    def report(lags: Mapping[str, int]) -> None:
        nonlocal last
        line = "behind: " + ", ".join(f"{name} {lag:,}" for name, lag in lags.items())
        if line != last:
            print(line, end="\r" if live else "\n", file=sys.stderr, flush=True)
        last = line

    def warn(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    run_views(
        [*VIEWS], log_url, views_url, perform=open_cache(cache).perform, stop=stop, once=once,
        report=report, warn=warn,
    )  # fmt: skip
