"""Hashes of the contents of source files, each computed once for as long as the file does not change.

A file is known by its path and its stamp: device, inode, size, and the times of its last modification and last change of
status. A program can set the first time, but not the second. The clock of a file system ticks every few milliseconds, so a
file that was changed twice in one tick may keep its stamp. A hash is therefore kept only if the file is older than
`MIN_AGE` seconds when it is hashed (Git does the same: "racy" entries of its index).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.data.files import open_file
from whorl.machine.device_probe import usable_cores

if TYPE_CHECKING:
    from whorl.corpus.provenance.catalog import Catalog

MIN_AGE = 2.0
THREADS = 8
PARALLEL_BYTES = 50_000_000  # of fewer, threads cost more than they gain


class ContentHashes:
    """Hashes by path, in memory and in a catalogue.

    Args:
        catalog: keeps the hashes for later runs.
    """

    def __init__(self, catalog: Catalog | None = None) -> None:
        self.catalog = catalog
        self.known: dict[str, tuple[str, str]] = {}  # path -> stamp, hash

    def of(self, paths: Sequence[str]) -> list[str]:
        """Return the BLAKE2b of each local file, 32 hex digits; "unreadable ERRNO" if it cannot be read."""
        stamps, sizes, missing = dict[str, str](), dict[str, int](), set[str]()
        for path in paths:
            try:
                status = Path(path).stat()
            except OSError:
                stamps[path], sizes[path] = "", 0
                continue
            times = status.st_mtime_ns, status.st_ctime_ns
            values = status.st_dev, status.st_ino, status.st_size, *times
            sizes[path] = status.st_size
            is_old = max(times) < (time.time() - MIN_AGE) * 1e9
            stamps[path] = ":".join(map(str, values)) if is_old else ""
        if self.catalog is not None:
            self.known |= self.catalog.known_hashes([p for p in stamps if stamps[p] and p not in self.known])
        missing = {p for p in stamps if not stamps[p] or self.known.get(p, ("",))[0] != stamps[p]}
        hashes = dict(zip(missing, self._hash_all([*missing], sizes), strict=True))
        kept = {p: (stamps[p], hash) for p, hash in hashes.items() if stamps[p] and " " not in hash}
        self.known |= kept
        if self.catalog is not None:
            self.catalog.keep_hashes(kept)
        return [hashes.get(path) or self.known[path][1] for path in paths]

    def _hash_all(self, paths: Sequence[str], sizes: dict[str, int]) -> list[str]:
        if sum(sizes[path] for path in paths) < PARALLEL_BYTES:
            return [*map(hash_content, paths)]
        with ThreadPoolExecutor(min(THREADS, usable_cores())) as pool:
            return [*pool.map(hash_content, paths)]


def hash_content(path: str) -> str:
    """Return the BLAKE2b of a file's content, or "unreadable ERRNO"."""
    try:
        stream: Any
        with open_file(path) as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        return f"unreadable {error.errno}"
