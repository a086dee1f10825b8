"""Vectors of passages in a file to which each write appends: exact search, and FAISS once the file is large.

The manifest of the index has the number of vectors that count, so a write that was killed leaves nothing behind: the next
one overwrites it. Deleted passages stay until they are more than half; the rest is then written into a new file. Until then
the text index decides which rows are alive.

    up to 20,000 vectors      every vector is compared
    more                      IVF-PQ (Jegou et al. 2011, doi:10.1109/TPAMI.2010.57) with 4 bits per pair of dimensions, made
                              again when their number has doubled; its candidates, and later vectors, are compared exactly

bench/loop/vectors.py compares the choice with HNSW (Malkov and Yashunin 2016, arXiv:1603.09320).
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.files import write_atomic
from whorl.search.documents import Vectors

Rows = NDArray[np.int64]
Entry = dict[str, Any]  # of the manifest: name of the file, n
FLAT = 20_000  # vectors of the largest file without an index
SPARSE = 1000  # vectors of a file that may be mostly of deleted passages
REFINE = 20  # candidates of IVF-PQ per result
PROBES = 4  # one in so many lists is searched
PREFIX = "vectors-"


def faiss() -> Any:
    """Import FAISS, whose types are not those of its Python side."""
    return importlib.import_module("faiss")


def build(vectors: Vectors) -> Any:
    """Return an index of FAISS over unit vectors [n, d]."""
    n, d = vectors.shape
    lists = max(1, int(n**0.5))
    codes = "Flat" if d % 2 else f"PQ{d // 2}x4fs"
    index = faiss().index_factory(d, f"IVF{lists},{codes}", faiss().METRIC_INNER_PRODUCT)
    index.train(vectors[:: max(1, n // (64 * lists))])
    index.add(vectors)
    return index


class VectorFile:
    """The vectors of one encoder at one commit. opened: those of an earlier commit, whose FAISS index is kept.

    Attributes:
        rows: of the passages, ascending [n]. vectors: unit vectors [n, d]. indexed: how many of them FAISS has.
    """

    def __init__(self, folder: Path, entry: Entry, dim: int, opened: VectorFile | None = None) -> None:
        self.path, self.entry, n = folder / entry["name"], entry, entry["n"]
        self.rows: Rows = np.fromfile(f"{self.path}.rows", np.int64, n)
        self.vectors: Vectors = np.memmap(self.path, np.float32, "r", 0, (n, dim))
        sizes = (int(each.suffix.removeprefix(".faiss")) for each in folder.glob(f"{entry['name']}.faiss*"))
        self.indexed, self._index = max((size for size in sizes if size <= n), default=0), None
        if opened is not None and (opened.path, opened.indexed) == (self.path, self.indexed):
            self._index = opened._index
        elif self.indexed:
            self._index = faiss().read_index(f"{self.path}.faiss{self.indexed}")

    def nearest(self, query: Vectors, k: int, rows: Rows | None = None) -> list[tuple[int, float]]:
        """Return (row, cosine) of the k nearest to a unit vector [d]; rows: sorted, only among these, exactly."""
        query = np.ascontiguousarray(query, np.float32)
        if rows is not None:
            at = np.searchsorted(self.rows, rows)
            at = at[at < len(self.rows)]
            at = at[np.isin(self.rows[at], rows, assume_unique=True)]
        elif self._index is not None:
            probes = faiss().SearchParametersIVF(nprobe=max(8, self._index.nlist // PROBES))
            _, found = self._index.search(query[None], min(REFINE * k, self.indexed), params=probes)
            at = np.sort(found[0][found[0] >= 0])
        else:
            at = np.empty(0, np.int64)
        cosines = self.vectors[at] @ query
        if rows is None:
            at = np.concatenate([at, np.arange(self.indexed, len(self.rows))])
            cosines = np.concatenate([cosines, self.vectors[self.indexed :] @ query])
        best = np.argpartition(-cosines, k)[:k] if k < len(cosines) else np.arange(len(cosines))
        best = best[np.argsort(-cosines[best], kind="stable")]
        return list(zip(self.rows[at[best]].tolist(), cosines[best].tolist(), strict=True))

    def build_index(self) -> None:
        """Write the index of FAISS that a file of this size has."""
        write_atomic(
            self.path.with_suffix(f".faiss{len(self.rows)}"),
            faiss().serialize_index(build(np.asarray(self.vectors))).tobytes(),
        )

    @property
    def has_grown(self) -> bool:
        """Whether another index of FAISS is due."""
        return len(self.rows) > max(FLAT, 2 * self.indexed)


def append(folder: Path, old: VectorFile | None, rows: Rows, vectors: Vectors, alive: Rows | None) -> Entry:
    """Write new vectors [n, d] behind those of a file; return the entry of the manifest.

    Args:
        rows: ascending, above all earlier ones.
        alive: sorted rows of passages that are not deleted: these and the new ones are written into another file.
    """
    n, name = (0, f"{PREFIX}{uuid.uuid4().hex[:16]}") if old is None else (len(old.rows), old.path.name)
    if old is not None and alive is not None:
        keep = np.isin(old.rows, alive, assume_unique=True)
        rows, vectors = np.concatenate([old.rows[keep], rows]), np.concatenate([old.vectors[keep], vectors])
        n, name = 0, f"{PREFIX}{uuid.uuid4().hex[:16]}"
    for path, values in (
        (f"{name}.rows", np.asarray(rows, np.int64)),
        (name, np.asarray(vectors, np.float32)),
    ):
        with (folder / path).open("r+b" if n else "wb") as file:
            file.seek(n * values[0].nbytes)
            file.write(values.tobytes())
            file.flush()
            os.fsync(file.fileno())
    return {"name": name, "n": n + len(rows)}


def remove_unused(folder: Path, files: Collection[VectorFile]) -> None:
    """Remove what no file of the last commit has."""
    used = {f"{file.path.name}{end}" for file in files for end in ("", ".rows", f".faiss{file.indexed}")}
    for path in folder.glob(f"{PREFIX}*"):
        if path.name not in used:
            path.unlink(missing_ok=True)
