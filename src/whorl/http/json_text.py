"""Bounds on JSON text before it is parsed: parsing costs time for each value, and holds the interpreter's lock throughout.

4 MB of `[1],[1],...` took a JSON parser 0.7 s, in which no other thread of the process ran. Counting the structural
characters outside of strings takes 10 ms, without the lock.
"""

from __future__ import annotations

import numpy as np

MAX_CONTAINERS = 50_000  # lists and objects
MAX_FIELDS = 50_000  # of all objects
MAX_STRINGS = 100_000  # names of fields included
MAX_ITEMS = 500_000  # values of any kind; token ids are most of them
_CHUNK = 1 << 16  # bytes


def json_text_problem(body: bytes, factor: int = 1) -> str:
    """Return what exceeds `factor` times the bounds, or "". Text that is not JSON gives anything; the parser refuses it."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    data, counts, quotes = np.frombuffer(body, np.uint8), np.zeros(256, np.int64), 0
    for start in range(0, len(data), _CHUNK):
        part = data[start : start + _CHUNK]
        n_quotes = np.cumsum(part == ord('"')) + quotes
        quotes = int(n_quotes[-1])
        counts += np.bincount(part[n_quotes % 2 == 0], minlength=256)
    found = {char: int(counts[ord(char)]) for char in "[{:,"}
    for n, limit, name in (
        (found["["] + found["{"], MAX_CONTAINERS, "lists and objects"),
        (found[":"], MAX_FIELDS, "fields"),
        (quotes // 2, MAX_STRINGS, "strings"),
        (found[","], MAX_ITEMS, "values"),
    ):
        if n > factor * limit:
            return f"{n:,} {name}; at most {factor * limit:,} are accepted"
    return ""
