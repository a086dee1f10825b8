"""Earlier corpora: documents that stay, with which those of a new corpus are compared.

An entry of `curate.earlier` is a folder with document files, or an artifact of the store by name or address. Of the
documents of a corpus ("web/ingest") all are compared, of a selection ("web/curate") those that it kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.settings import EarlierConfig
from whorl.corpus.mapreduce import Input
from whorl.errors import ConfigError, StoreError
from whorl.store import Artifact, Store


@dataclass(frozen=True)
class EarlierCorpus:
    """Document files, and which of all their rows are compared: [n_documents], None for all."""

    name: str
    files: Sequence[Path]
    kept: NDArray[np.bool_] | None
    digest: str


def find_earlier(name: str, store: Store | None = None) -> EarlierCorpus:
    """Return an earlier corpus. Raises ConfigError: the name is unknown, or the corpus has no documents."""
    folder = Path(name).expanduser()
    if files := sorted(folder.glob("documents-*.parquet")):
        digests = "".join(Input.of(path).digest for path in files)
        return EarlierCorpus(name, files, None, hashlib.blake2b(digests.encode(), digest_size=16).hexdigest())
    artifact = _artifact(name, store)
    kept, digest = None, artifact.address
    if artifact.kind == "selection":
        kept = _kept_rows(artifact.file("selection.parquet"))
        assert store is not None
        artifact = store.open(artifact.parents["documents"])
    artifact.check()
    return EarlierCorpus(name, sorted(artifact.path.glob("documents-*.parquet")), kept, digest)


def with_digest(entry: str | EarlierConfig, store: Store | None = None) -> EarlierConfig:
    """Add the hash of the documents, so that an address changes with them."""
    name = entry if isinstance(entry, str) else entry.corpus
    return EarlierConfig(corpus=name, digest=find_earlier(name, store).digest)


def _artifact(name: str, store: Store | None) -> Artifact:
    expected = "a folder with documents-*.parquet, or the name of an artifact of ingest or curate"
    if store is None:
        raise ConfigError(f"curate.earlier: {name} has no documents", expected=expected)
    try:
        artifact = store.open(name)
    except StoreError as error:
        raise ConfigError(f"curate.earlier: {error.what}", expected=expected) from error
    if artifact.kind not in ("documents", "selection"):
        raise ConfigError(f"curate.earlier: {name} is an artifact of {artifact.kind}", expected=expected)
    return artifact


def _kept_rows(path: Path) -> NDArray[np.bool_]:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    column = pq.read_table(path, columns=["reason"])["reason"]
    kept: NDArray[np.bool_] = pc.equal(column, "").to_numpy()
    return kept
