"""Commit to searchable, and a rebuild, while rows of a SQLite database change.

    python bench/loop/indexing.py                       # 20,000 rows, then 60 s of 100 changes a second, one rebuild

`whorl watch` captures and indexes a table. A writer inserts, updates and deletes rows. Every tenth commit holds a new word;
the time from the commit until a reader of the index finds the word is a sample, at most twice the refresh interval at p99.
`whorl search --rebuild` begins after a third of the time. At the end the index must equal the table as a set of content
hashes.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from bench._run import claim, parse

from whorl.loop.search.documents import content_of
from whorl.loop.search.indexer import REFRESH_SECONDS
from whorl.loop.search.reader import SearchReader
from whorl.loop.search.settings import load_settings
from whorl.search.documents import SearchQuery, content_digest

PROBE = 10  # commits per sample
DEADLINE = 120.0  # seconds
WORDS = [
    "river",
    "stone",
    "cloud",
    "paper",
    "glass",
    "green",
    "music",
    "table",
    "light",
    "water",
    "north",
    "metal",
]


def whorl(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "whorl.cli", *words], stderr=subprocess.DEVNULL)


def write(
    database: Path, rows: int, seconds: float, rate: float, seed: int, probes: list[tuple[str, float]]
) -> None:  # fmt: skip
    """Commit changes at a rate. probes: gets (word, time of its commit)."""
    draw, began, n = random.Random(seed), time.monotonic(), 0
    with sqlite3.connect(database, timeout=60) as connection:
        while (now := time.monotonic()) < began + seconds:
            n += 1
            time.sleep(max(0.0, began + n / rate - now))
            text = " ".join(draw.choices(WORDS, k=60))
            chosen = draw.randint(1, rows)  # no sample
            if n % PROBE == 0:
                connection.execute(
                    "INSERT INTO docs (title, body) VALUES ('probe', ?)", (f"{text} probe{n}x",)
                )
            elif draw.random() < 0.2:
                connection.execute("DELETE FROM docs WHERE id = ?", (chosen,))
            else:
                connection.execute("UPDATE docs SET body = ? WHERE id = ?", (text, chosen))
            connection.commit()
            if n % PROBE == 0:
                probes.append((f"probe{n}x", time.monotonic()))


def latencies(reader: SearchReader, probes: list[tuple[str, float]], writer: threading.Thread) -> list[float]:
    """Return the seconds from each commit until its word was found; infinity after the deadline."""
    found, at = list[float](), 0
    while writer.is_alive() or at < len(probes):
        if at == len(probes):
            time.sleep(0.002)
            continue
        word, committed = probes[at]
        while not reader.search(SearchQuery(word, k=1, typos=False, marks=False)).total:
            if time.monotonic() > committed + DEADLINE:
                return [*found, float("inf")]
            time.sleep(0.005)
        found.append(time.monotonic() - committed)
        at += 1
    return found


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rows", type=int, default=20_000)
        parser.add_argument("--seconds", type=float, default=60.0)
        parser.add_argument("--rate", type=float, default=100.0, help="commits per second")
        parser.add_argument("--seed", type=int, default=0)

    args = parse(__doc__, arguments, smoke={"rows": 300, "seconds": 4.0, "rate": 50.0})
    with tempfile.TemporaryDirectory() as folder:
        database, store = Path(folder) / "app.db", Path(folder) / "store"
        with sqlite3.connect(database) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE docs (id INTEGER PRIMARY KEY, title TEXT, body TEXT)")
            rows = [(f"title {n}", " ".join(random.Random(n).choices(WORDS, k=60))) for n in range(args.rows)]
            connection.executemany("INSERT INTO docs (title, body) VALUES (?, ?)", rows)
        where = ("--store", str(store))
        watch = (
            "watch",
            str(database),
            "--to",
            "docs",
            "--table",
            "docs",
            "--text",
            "body",
            "--title",
            "title",
            *where,
        )
        whorl(*watch, "--once").wait()
        watching = whorl(*watch)
        probes: list[tuple[str, float]] = []
        writer = threading.Thread(
            target=write, args=(database, args.rows, args.seconds, args.rate, args.seed, probes)
        )
        try:
            time.sleep(3.0)  # the start of the process
            with SearchReader(store, "docs") as reader:
                writer.start()
                rebuilding = threading.Timer(
                    args.seconds / 3,
                    lambda: whorl("search", "nothing", "--in", "docs", "--rebuild", *where).wait(),
                )
                rebuilding.start()
                times = latencies(reader, probes, writer)
                rebuilding.join()
                generation = load_settings(store, "docs").generation
                with sqlite3.connect(database) as connection:
                    connection.row_factory = sqlite3.Row
                    table = Counter(
                        content_digest(*content_of(dict(row), "body"))
                        for row in connection.execute("SELECT * FROM docs")
                    )
                deadline = time.monotonic() + DEADLINE
                while (index := Counter(digest for *_, digest in reader.index().documents())) != table:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.2)
        finally:
            watching.terminate()
            watching.wait()
    wrong, (p50, p99) = ((index - table) + (table - index)).total(), np.quantile(times, [0.5, 0.99])
    print(
        f"{len(times)} samples, p50 {p50:.3f} s, p99 {p99:.3f} s; generation {generation}; {wrong} documents differ"
    )
    claim(
        "index equals the table after changes and a rebuild", ours=table.total() - wrong, peer=table.total(),
        peer_name="table", unit="documents", ratio=1 - wrong / max(1, table.total()), bar=1.0,
        ok=not wrong and generation == 1, variant="equal",
    )  # fmt: skip
    claim(
        "commit to searchable, p99, also during a rebuild", ours=float(p99), peer=REFRESH_SECONDS,
        peer_name="refresh interval", unit="s", ratio=float(p99) / REFRESH_SECONDS, bar=2.0,
        ok=p99 <= 2 * REFRESH_SECONDS, samples=[round(each, 4) for each in times],
    )  # fmt: skip


if __name__ == "__main__":
    main()
