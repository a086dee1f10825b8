"""Every acknowledged record is there after kill -9: of the writing process for SQLite, of the server for all others."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from tests.support.log.s3 import object_store
from tests.support.log.servers import running

from whorl.log import Event, Log, open_log
from whorl.log.port import LogUnavailableError

WRITERS, PACE = 4, 0.002  # threads; seconds between two appends of one
CHILD = """
import sys
from whorl.log import Event, open_log

log = open_log(sys.argv[1])
log.create("t")
for i in range(10**9):
    event = Event("e", f"key {i % 10}", {"n": i})
    log.append("t", event)
    print(event.id, flush=True)
"""


class Writers:
    """Threads that append until they are stopped; an event without acknowledgement is sent again. acknowledged: ids."""

    def __init__(self, log: Log) -> None:
        self.log, self.acknowledged, self._stop = log, list[str](), threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(WRITERS)]

    def _write(self, number: int) -> None:
        i = 0
        while not self._stop.is_set():
            event = Event("e", f"writer {number}", {"n": i})
            while not self._stop.is_set():
                try:
                    self.log.append("t", event, timeout=5)
                except LogUnavailableError:
                    time.sleep(0.05)
                    continue
                self.acknowledged.append(event.id)
                i += 1
                break
            time.sleep(PACE)

    def wait_for(self, more: int) -> None:
        goal, deadline = len(self.acknowledged) + more, time.monotonic() + 30
        while len(self.acknowledged) < goal:
            assert time.monotonic() < deadline, f"{len(self.acknowledged)} of {goal} acknowledged"
            time.sleep(0.01)

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def check(log: Log, acknowledged: list[str], repeats: bool = False) -> list[str]:
    """Return the acknowledged ids that are lost. Checks the order within a key, and that no id is there twice."""
    events = [record.event() for record in log.replay("t")]
    counts = Counter(event.id for event in events)
    assert repeats or max(counts.values()) == 1
    by_key: dict[str, list[int]] = {}
    for event in events:
        by_key.setdefault(event.key, []).append(event.data["n"])
    assert repeats or all(own == sorted(own) for own in by_key.values())
    return [name for name in acknowledged if name not in counts]


@contextmanager
def server_of(kind: str):
    with object_store() as environment:
        options = {"storage": "s3://tansu/", "environment": environment} if kind == "kafka" else {}
        with running(kind, **options) as server:
            yield server


def test_sqlite_keeps_what_a_killed_process_appended(tmp_path):
    url = f"sqlite:{tmp_path / 'events.db'}"
    child = subprocess.Popen([sys.executable, "-c", CHILD, url], stdout=subprocess.PIPE, text=True)
    ids = [child.stdout.readline().strip() for _ in range(200)]
    child.send_signal(signal.SIGKILL)
    ids += [line.strip() for line in child.stdout if line.endswith("\n")]
    child.wait()
    with open_log(url) as log:
        assert check(log, ids) == []
        assert log.append("t", Event("e", "key 0", {"n": 10**9}))


@pytest.mark.parametrize("kind", ["postgresql", "nats", "kafka"])
def test_a_killed_server_keeps_what_it_acknowledged(kind):
    """The writers wait while it is away, and continue when it is back."""
    with server_of(kind) as server, open_log(server.url) as log:
        log.create("t")
        with Writers(log) as writers:
            for _ in range(2):
                writers.wait_for(100)
                server.kill()
                time.sleep(0.2)
                server.start()
            writers.wait_for(50)
        with open_log(server.url) as again:
            repeats = "duplicates" in dict(log.guarantees.misses)
            assert check(again, writers.acknowledged, repeats) == []
            assert check(log, writers.acknowledged, repeats) == []


def test_the_suite_finds_a_broker_that_loses_records():
    with server_of("noida") as server:
        with open_log(f"{server.url}?message.timeout.ms=1000") as log:
            log.create("t")
            with Writers(log) as writers:
                writers.wait_for(300)
                server.kill()
        server.start()
        try:
            with open_log(server.url) as again:
                lost = check(again, writers.acknowledged, repeats=True)
        except Exception as error:  # its topics are lost too
            lost = [repr(error)]
        assert lost


def test_a_server_that_is_away_is_an_error_and_works_again():
    with running("postgresql") as server, open_log(server.url) as log:
        log.create("t")
        server.kill()
        with pytest.raises(LogUnavailableError):
            log.append("t", Event("e", "k", {"n": 0}))
        with pytest.raises(LogUnavailableError):
            log.bounds("t")
        server.start()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                log.append("t", Event("e", "k", {"n": 1}, id="one"))
                break
            except LogUnavailableError:  # it recovers
                time.sleep(0.1)
        assert [record.event().data["n"] for record in log.replay("t")] == [1]
