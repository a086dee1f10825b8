"""Lists of scored links: only pages that people linked to with a score are documents.

The rule is that of WebText (Radford et al. 2019, section 2.1): pages that Reddit's users linked to with at least 3 karma.
A list is a file of records with a `url` and a `score`, such as JSONL. Of several scores of an address the highest counts.

Addresses are compared without scheme, fragment and final slash, and with the host in lower case. The good ones are
held as sorted 64-bit hashes: 8 bytes each, and an address without a link passes with a probability of n / 2^64.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whorl.data.files import expand_globs, is_url, open_file
from whorl.data.formats import open_format
from whorl.data.quarantine import BadRecordError
from whorl.errors import DataError


@dataclass(frozen=True, slots=True)
class LinkFile:
    """A file of links. digest: BLAKE2b of its content, 32 hex digits."""

    path: str
    digest: str


class GoodLinks:
    """The addresses whose score is at least `min_score`. Raises DataError: a list cannot be read."""

    def __init__(self, paths: Sequence[str], min_score: float) -> None:
        hashes = np.fromiter(_good_hashes(paths, min_score), np.uint64)
        self.hashes, self.min_score = np.unique(hashes), min_score

    def __len__(self) -> int:
        return len(self.hashes)

    def __contains__(self, url: str | None) -> bool:
        if not url or not len(self.hashes):
            return False
        found = np.uint64(_hash(url))
        at = int(np.searchsorted(self.hashes, found))
        return at < len(self.hashes) and bool(self.hashes[at] == found)

    def check(self, url: str | None) -> None:
        """Raise BadRecordError: a document of this address is not good enough."""
        if url not in self:
            detail = f"no link to {url} has a score of {self.min_score:g} or more" if url else "it has no url"
            raise BadRecordError("low_link_score", "url", detail)


def find_links(patterns: Sequence[str]) -> list[LinkFile]:
    """Return the files of links and their digests; reads them. Raises DataError: one is missing."""
    found = []
    for name in expand_globs(patterns):
        path = name if is_url(name) else str(Path(name).expanduser().absolute())
        try:
            stream: Any
            with open_file(path) as stream:
                digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise DataError(
                f"the link list {name} cannot be read: {error.strerror or error}",
                expected="a file of records with url and score",
                do="check ingest.links",
            ) from error
        found.append(LinkFile(path, digest))
    return found


@functools.lru_cache(maxsize=1)
def good_links(files: tuple[LinkFile, ...], min_score: float) -> GoodLinks:
    """Return the good links of some files; those of the last call are kept, since every block needs them."""
    return GoodLinks([file.path for file in files], min_score)


def address_key(url: str) -> str:
    """Return an address in the form in which addresses are compared."""
    rest = url.strip().partition("#")[0].partition("://")
    host, slash, path = (rest[2] or rest[0]).partition("/")
    return f"{host.lower()}{slash}{path}".rstrip("/")


def _hash(url: str) -> int:
    key = address_key(url).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())


def _good_hashes(paths: Sequence[str], min_score: float) -> Iterator[int]:
    for path in paths:
        for record in open_format(path, fields=["url", "score"]).records(path):
            url, score = _link(path, record.number, record.value)
            if score is not None and score >= min_score:
                yield _hash(url)


def _link(path: str, number: int, value: Any) -> tuple[str, float | None]:
    """Return the address and the score of a record."""
    problem = str(value) if isinstance(value, BadRecordError) else ""
    if not problem:
        url, score = value.get("url"), value.get("score")
        if isinstance(url, str) and (score is None or type(score) in (int, float)):
            return url, score
        problem = f"url is {ascii(url)[:100]}, score is {ascii(score)[:100]}"
    raise DataError(
        f"{path}, record {number}: {problem}",
        expected='records such as {"url": "https://example.org/page", "score": 5}',
        do="correct the link list",
    )
