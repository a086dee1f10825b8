"""A cache of counts: an entry has the cells of all partitions, and lives for `seconds`.

A cold entry is dropped when its count changes, and the next reader fills it again (`cache-aside`). A hot one, read at least
HOT times while it lived, takes the changed cell instead, so that a viral answer never misses. Cells of different partitions
are independent, and of two versions of a cell the newer stays. So an effect may be lost or repeated: the entry is then old
for at most `seconds`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whorl.errors import ConfigError
from whorl.loop.streams.view import ViewEffect

HOT = 20  # reads
SECONDS = 2.0
MOST = 100_000  # entries in process
Cells = dict[str, list[int]]  # partition -> changes, likes, dislikes


@dataclass(slots=True)
class _Entry:
    cells: Cells
    until: float
    reads: int = 0


class LocalCache:
    """Entries of this process. Its methods may be called from any thread."""

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._entries, self._lock = dict[str, _Entry](), threading.Lock()
        self._seconds, self._clock = seconds, clock

    def get(self, answers: Sequence[str]) -> dict[str, Cells]:
        """Return the entries that are alive."""
        with self._lock:
            now = self._clock()
            alive = {a: e for a in answers if (e := self._entries.get(a)) is not None and e.until > now}
            for entry in alive.values():
                entry.reads += 1
            return {answer: dict(entry.cells) for answer, entry in alive.items()}

    def fill(self, entries: Mapping[str, Cells]) -> None:
        with self._lock:
            if len(self._entries) + len(entries) > MOST:
                self._entries.clear()
            until = self._clock() + self._seconds
            self._entries |= {answer: _Entry(dict(cells), until) for answer, cells in entries.items()}

    def perform(self, effects: Iterable[ViewEffect]) -> None:
        """Take the changed cells of the view of likes: into hot entries; cold ones are dropped."""
        with self._lock:
            for effect in effects:
                if effect.name != "count" or (entry := self._entries.get(effect.key)) is None:
                    continue
                partition, cell = effect.value["partition"], effect.value["cell"]
                if entry.reads < HOT:
                    del self._entries[effect.key]
                elif entry.cells.get(partition, (0,))[0] < cell[0]:
                    entry.cells[partition] = list(cell)


_GET = """
local found = redis.call('HGETALL', KEYS[1])
if #found > 0 then redis.call('HINCRBY', KEYS[1], 'reads', 1) end
return found"""
_MERGE = """
local reads = redis.call('HGET', KEYS[1], 'reads')
if not reads then return end
if tonumber(reads) < tonumber(ARGV[1]) then return redis.call('DEL', KEYS[1]) end
local changes = tonumber(string.match(redis.call('HGET', KEYS[1], ARGV[2]) or '0', '%d+'))
if changes < tonumber(ARGV[3]) then redis.call('HSET', KEYS[1], ARGV[2], ARGV[4]) end"""


class RedisCache:
    """The same of many processes, as hashes in Redis. While it is away nothing is found and nothing fails."""

    def __init__(self, url: str, seconds: float = SECONDS) -> None:
        import redis

        self._redis = redis.Redis.from_url(url, decode_responses=True, socket_timeout=0.5)
        self._away, self._milliseconds = redis.RedisError, round(seconds * 1000)

    def get(self, answers: Sequence[str]) -> dict[str, Cells]:
        rows = self._run([("EVAL", _GET, 1, f"count:{answer}") for answer in answers])
        found = {
            a: zip(row[::2], row[1::2], strict=True) for a, row in zip(answers, rows, strict=False) if row
        }
        return {
            a: {p: [*map(int, cell.split())] for p, cell in row if p != "reads"} for a, row in found.items()
        }

    def fill(self, entries: Mapping[str, Cells]) -> None:
        commands = list[tuple[str | int, ...]]()
        for answer, cells in entries.items():
            key, fields = f"count:{answer}", [x for p, cell in cells.items() for x in (p, _text(cell))]
            commands += ("DEL", key), ("HSET", key, "reads", 0, *fields), ("PEXPIRE", key, self._milliseconds)
        self._run(commands)

    def perform(self, effects: Iterable[ViewEffect]) -> None:
        cells = [(e.key, e.value["partition"], e.value["cell"]) for e in effects if e.name == "count"]
        self._run([("EVAL", _MERGE, 1, f"count:{a}", HOT, p, cell[0], _text(cell)) for a, p, cell in cells])

    def _run(self, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
        pipe: Any = self._redis.pipeline()
        for command in commands:
            pipe.execute_command(*command)
        try:
            return list(pipe.execute())
        except self._away:
            return []


CountCache = LocalCache | RedisCache


def open_cache(url: str = "") -> CountCache:
    """Return a cache: "" in this process, or redis://HOST. Raises ConfigError: another scheme, or no client."""
    if not url:
        return LocalCache()
    if not url.startswith("redis://"):
        raise ConfigError(f"the cache {url!r}", expected="redis://HOST")
    try:
        return RedisCache(url)
    except ImportError as error:
        raise ConfigError("the package redis is not installed", do="pip install 'whorl[redis]'") from error


def _text(cell: Sequence[int]) -> str:
    return " ".join(map(str, cell))
