"""All views of a process: one thread each, until a signal or, with `once`, until all have read everything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress

from whorl.log.locations import open_log
from whorl.log.port import Log, LogUnavailableError
from whorl.loop.events import create_topics
from whorl.loop.streams.store import ViewStore, ViewsUnavailableError
from whorl.loop.streams.view import FoldedView
from whorl.loop.streams.worker import Perform, ViewWorker

LINGER = 1.0  # seconds that a view lets records gather: one delta per key and batch
LONGEST_WAIT = 15.0  # seconds between attempts to reach a log or store that is away


def run_views(
    views: Sequence[FoldedView], log_url: str, store_url: str, *, perform: Perform, stop: threading.Event,
    once: bool = False, report: Callable[[Mapping[str, int]], None] = lambda lags: None,
    warn: Callable[[str], None] = lambda text: None,
) -> None:  # fmt: skip
    """Fold all views. A log or store that is away is waited for.

    Args:
        stop: ends all of them. once: end when all have read what the log has. report: gets the lag of each view each second.

    Raises:
        OffsetRemovedError, DataError: of the first view that cannot continue; the others are stopped.
    """
    with open_log(log_url) as log, ViewStore(store_url) as store, ThreadPoolExecutor(len(views)) as threads:
        create_topics(log)
        running = {threads.submit(_run, view, log, store_url, perform, stop, once, warn) for view in views}
        try:
            waiting = running
            while waiting and not any(one.exception() for one in running - waiting):
                waiting = wait(running, 1.0, FIRST_EXCEPTION).not_done
                with suppress(LogUnavailableError, ViewsUnavailableError):  # the threads warn
                    report({view.name: lag_of(view, log, store) for view in views})
        finally:
            stop.set()
        for one in running:
            one.result()


def lag_of(view: FoldedView, log: Log, store: ViewStore) -> int:
    """Return the records that a view has still to read."""
    done = store.offsets(view.name)
    return sum(
        max(0, bound.next - max(bound.first, done.get((topic, number), (0, 0))[0]))
        for topic in view.topics
        for number, bound in enumerate(log.bounds(topic))
    )


def _run(
    view: FoldedView, log: Log, store_url: str, perform: Perform, stop: threading.Event, once: bool,
    warn: Callable[[str], None],
) -> None:  # fmt: skip
    delay = 0.5
    while not stop.is_set():
        try:
            with ViewStore(store_url) as store:
                worker = ViewWorker(view, log, store, perform)
                for point in worker.steps():
                    if point == "idle":
                        delay = 0.5
                        if (once and lag_of(view, log, store) == 0) or stop.wait(LINGER):
                            break
                    elif stop.is_set():
                        break
                worker.close()
                return
        except (LogUnavailableError, ViewsUnavailableError) as error:
            warn(f"{view.name} waits: {error}")
            stop.wait(delay := min(2 * delay, LONGEST_WAIT))
