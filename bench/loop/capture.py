"""An index equals its table after changes of rows under SIGKILLs of capture, indexer and database.

    python bench/loop/capture.py                              # SQLite: 200,000 row changes, 30 SIGKILLs
    python bench/loop/capture.py --source postgresql          # also folder
    python bench/loop/capture.py --source mariadb --kills 10

A writer commits transactions of 1 to 10,000 changes (`_captured.py`); a column is added halfway. Capture, indexer and the
database (the server; for SQLite and a folder the writer) are killed at random moments and started again. At the end the
documents of the index and the rows of the table are compared as sets of (id, version, content hash). The version is the
offset of the newest record of the key, the content is read by a query of the workload. With SQLite, changes are also
written twice, to a table and then to an index, under the same number of kills.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse
from bench.loop._captured import Workload, reopened, workload

from whorl.log import Log, default_log, open_log
from whorl.loop.capture.capture import Capture, run_capture
from whorl.loop.capture.source import SourceOptions, open_source
from whorl.loop.search.documents import content_of
from whorl.loop.search.indexer import Indexer, index_url, run_indexer
from whorl.loop.search.settings import SearchSettings, save_settings
from whorl.search.documents import Passage, SearchDocument, content_digest
from whorl.search.index import open_index

SIZES, SHARES = (1, 10, 100, 1000, 10_000), (0.4, 0.3, 0.2, 0.08, 0.02)
FIELDS = {"folder": ("path", "url")}
TABLE_FIELDS = ("price", "number", "extra")
DUAL_CHANGES = 20_000
Triple = tuple[str, int, str]


def options(store: Path, source: str, target: str, log: Log) -> SourceOptions:
    history = lambda: (record.event() for record in log.replay("docs"))  # noqa: E731
    return SourceOptions(
        target, "" if source == "folder" else "docs", "docs", store / "capture" / "docs", history
    )


def capture(store: Path, source: str, target: str, once: bool = False) -> Capture:
    """Capture until the process is killed, or until everything is read; return what was done."""
    while True:
        try:
            with (
                open_log(default_log(store)) as log,
                open_source(options(store, source, target, log)) as opened,
            ):
                found = Capture(opened, log, "docs", lambda text: print(text, file=sys.stderr, flush=True))
                run_capture(found, threading.Event(), once)
                return found
        except Exception as error:  # the server is away at the start
            if once:
                raise
            print(f"again: {error}", file=sys.stderr, flush=True)
            time.sleep(0.2)


def write(source: str, target: str, seed: int, per_second: float, column: bool) -> None:
    """Commit transactions until the process is killed; print the number of changes of each."""
    draw, found, began, done = random.Random(seed), None, time.monotonic(), 0
    while True:
        try:
            if found is None:
                found = reopened(source, target)
                if column:
                    found.add_column()
            done += (n := found.commit(draw, draw.choices(SIZES, SHARES)[0]))
            print(n, flush=True)
            time.sleep(max(0.0, began + done / per_second - time.monotonic()))
        except Exception as error:  # the server is away
            print(f"again: {error!r}", file=sys.stderr, flush=True)
            found = None
            time.sleep(0.1)


def write_twice(target: str, folder: Path, seed: int) -> None:
    """Commit each transaction, then write its documents to an index, until SIGTERM."""
    draw, found = random.Random(seed), reopened("sqlite", target)
    index, rows, ended = open_index(str(folder), writable=True), found.rows(), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    while not ended:
        n = found.commit(draw, draw.choices(SIZES, SHARES)[0])
        before, rows, now = rows, found.rows(), time.time_ns()
        puts = [
            SearchDocument(key, now, [Passage(0, str(row["body"]))], digest=digest(row, "sqlite"))
            for key, row in rows.items()
            if before.get(key) != row
        ]
        index.write(puts, [(key, now) for key in before if key not in rows])
        print(n, flush=True)


def digest(row: dict[str, object], source: str) -> str:
    """Return the content hash of a row, of the columns that are indexed."""
    text, title = ("text", "title") if source == "folder" else ("body", "title")
    return content_digest(*content_of(row, text, title, FIELDS.get(source, TABLE_FIELDS)))


class Children:
    """Processes of this script, by role. done: changes that the writer committed."""

    def __init__(self, folder: Path, roles: dict[str, list[str]]) -> None:
        self.folder, self.roles, self.done = folder, roles, 0
        self.running = dict[str, subprocess.Popen[str]]()

    def start(self, role: str) -> None:
        command = [sys.executable, __file__, "--role", role, *self.roles[role]]
        with (self.folder / f"{role}.txt").open("a") as output:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
        self.running[role] = child
        threading.Thread(target=self._count, args=(child,), daemon=True).start()

    def _count(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self.done += int(line)

    def kill(self, role: str, by: signal.Signals = signal.SIGKILL) -> None:
        self.running[role].send_signal(by)
        self.running[role].wait()

    def close(self) -> None:
        for role in self.running:
            self.kill(role)


@contextmanager
def children(folder: Path, roles: dict[str, list[str]]) -> Iterator[Children]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = Children(folder, roles)
    try:
        for role in roles:
            found.start(role)
        yield found
    finally:
        found.close()


def run_with_kills(found: Children, args: argparse.Namespace, source: Workload | None) -> Counter[str]:
    """Kill processes evenly over the changes; return the kills by process."""
    draw, killed, column = random.Random(args.seed), Counter[str](), False
    names = [role for role in found.roles if role != "write" or source is None or source.server is None]
    names += ["server"] if source is not None and source.server is not None else []
    for number in range(args.kills + 1):
        threshold = args.changes * (number + draw.random() * (number < args.kills)) / max(1, args.kills)
        last, since = found.done, time.monotonic()
        while found.done < threshold:
            time.sleep(0.005)
            if found.done > last:
                last, since = found.done, time.monotonic()
            if time.monotonic() - since > 120:
                raise RuntimeError(f"no commit for 120 s: see {found.folder}")
            if not column and source is not None and found.done > args.changes / 2:
                column = True
                found.kill("write")
                found.roles["write"][-1] = "1"
                found.start("write")
        if number == args.kills:
            break
        time.sleep(draw.uniform(0, args.seconds / args.kills))  # a long transaction passes several thresholds
        name = draw.choice(names)
        killed[name] += 1
        if name == "server":
            assert source is not None and source.server is not None
            source.server.kill()
            source.server.start()
        else:
            found.kill(name)
            if name == "write":
                found.roles["write"][2] = str(number)
            found.start(name)
        print(f"{found.done:>9,} changes, killed {name}", file=sys.stderr, flush=True)
    return killed


def captured(args: argparse.Namespace, folder: Path) -> int:
    """Return how many documents of index and table differ."""
    store = folder / "store"
    settings = SearchSettings(topic="docs", fields=FIELDS.get(args.source, TABLE_FIELDS))
    if args.source != "folder":
        settings = settings.model_copy(update={"text": "body"})
    save_settings(store, "docs", settings)
    with workload(args.source, folder) as source:
        place = [str(store), args.source, source.target]
        roles = {
            "write": [args.source, source.target, str(args.seed), str(args.changes / args.seconds), ""],
            "capture": place, "index": [str(store)],
        }  # fmt: skip
        with open_log(default_log(store)) as log:
            Capture(open_source(options(store, args.source, source.target, log)), log, "docs").source.close()
        began = time.monotonic()
        with children(folder, roles) as running:
            killed = run_with_kills(running, args, source)
        done = capture(store, args.source, source.target, once=True)
        with Indexer(store, "docs") as indexer:
            indexer.catch_up()
        rows = reopened(args.source, source.target).rows()
    versions, kinds, transactions = dict[str, int](), Counter[str](), set[str]()
    with open_log(default_log(store)) as log:
        for record in log.replay("docs"):
            versions[record.key] = record.offset
            data = record.event().data or {}
            kinds[data.get("op", "heartbeat")] += 1
            transactions.add(data.get("transaction", {}).get("id", ""))
        rejected = sum(b.next for b in log.bounds("quarantine"))
    table = {(key, versions.get(key, -1), digest(row, args.source)) for key, row in rows.items()}
    index = open_index(index_url(store, "docs", settings))
    found: set[Triple] = set(index.documents())
    details = {
        "rows": len(table), "documents": len(found), "different": len(table ^ found), "records": dict(kinds),
        "transactions": len(transactions), "compared": sum("compared" in name for name in transactions),
        "quarantine": rejected, "kills": dict(killed), "changes": running.done, "captured at the end": done.changes,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    for name, value in details.items():
        print(f"{name}: {value}")
    for triple in sorted(table ^ found)[:6]:
        print(f"only in {'the table' if triple in table else 'the index'}: {triple}", file=sys.stderr)
    claim(
        f"{args.source}: index equal to the table after {args.changes:,} row changes and {args.kills} SIGKILLs",
        ours=len(table & found), peer=len(table), peer_name="rows of the table", unit="documents",
        ratio=len(table & found) / max(1, len(table | found)), bar=1.0, ok=table == found, samples=[details],
        variant="" if args.source == "sqlite" else args.source,
    )  # fmt: skip
    return len(table ^ found)


def written_twice(args: argparse.Namespace, folder: Path, captured_differ: int) -> None:
    """captured_differ: documents that differ after capture."""
    folder.mkdir()
    args.changes = min(args.changes, DUAL_CHANGES)  # each transaction reads the whole table
    with (
        workload("sqlite", folder) as source,
        children(folder, {"twice": [source.target, str(folder / "index"), str(args.seed)]}) as running,
    ):
        killed = run_with_kills(running, args, None)
        running.kill("twice", signal.SIGTERM)
        rows = reopened("sqlite", source.target).rows()
    table = {(key, digest(row, "sqlite")) for key, row in rows.items()}
    found = {(key, content) for key, _, content in open_index(str(folder / "index")).documents()}
    claim(
        f"dual writes of {args.changes:,} row changes under {args.kills} SIGKILLs diverge",
        ours=captured_differ, peer=len(table ^ found), peer_name="dual writes", unit="documents that differ",
        ratio=len(table ^ found), bar=1.0, ok=table != found, samples=[{"rows": len(table), "kills": dict(killed)}],
        variant="dual-writes",
    )  # fmt: skip


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--source", choices=("sqlite", "postgresql", "mariadb", "folder"), default="sqlite"
        )
        parser.add_argument("--changes", type=int, default=200_000)
        parser.add_argument("--kills", type=int, default=30)
        parser.add_argument("--seconds", type=float, default=150.0, help="over which the changes are spread")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)

    if sys.argv[1:2] == ["--role"]:
        role, *words = sys.argv[2:]
        if role == "write":
            write(words[0], words[1], int(words[2]), float(words[3]), bool(words[4]))
        elif role == "capture":
            capture(Path(words[0]), words[1], words[2])
        elif role == "index":
            run_indexer(lambda: Indexer(Path(words[0]), "docs"), threading.Event(), threading.Event())
        else:
            write_twice(words[0], Path(words[1]), int(words[2]))
        return
    args = parse(__doc__, arguments, smoke={"changes": 1000, "kills": 3, "seconds": 4.0})
    with tempfile.TemporaryDirectory() as folder:
        different = captured(args, Path(folder))
        if args.source == "sqlite":
            written_twice(args, Path(folder) / "twice", different)


if __name__ == "__main__":
    main()
