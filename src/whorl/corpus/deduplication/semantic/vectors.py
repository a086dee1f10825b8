"""Embeddings of document files: a unit of work each, kept under the encoder's address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.semantic.kmeans import unit_length
from whorl.corpus.mapreduce import Executor, Input, Stage, Unit, UnitStore
from whorl.errors import DataError
from whorl.registry import import_attribute

VERSION = 1
FILE = "vectors.npy"
_BATCH = 256  # texts at a time
Embed = Callable[[Sequence[str]], NDArray[np.float32]]


@dataclass(frozen=True)
class TextEncoder:
    """A function that embeds texts, given by a higher layer.

    address: of the artifact, or name and version of the model. opener: "module:name" of a function of the path that
    returns the function of texts -> [n, d].
    """

    address: str
    opener: str
    path: str


@dataclass(frozen=True)
class Vectors:
    """Embeddings and their encoder.

    values: [n, d] of unit length. encoder: the address of the encoder.
    """

    values: NDArray[np.float32]
    encoder: str

    @classmethod
    def of(cls, values: NDArray[np.float32], encoder: str) -> Vectors:
        """Return embeddings scaled to unit length.

        Raises:
            DataError: a row is zero or not finite, or the array is not [n, d].
        """
        if values.ndim != 2:
            raise DataError(f"vectors of {encoder} have the shape {values.shape}", expected="[n, d]")
        values = np.asarray(values, np.float32)
        bad = np.flatnonzero(~(np.isfinite(values).all(axis=1) & values.any(axis=1)))
        if len(bad):
            raise DataError(
                f"vector {bad[0]} of {encoder} is zero or not finite",
                expected="finite vectors with a direction",
                do="leave out documents without an embedding",
            )
        return cls(unit_length(values), encoder)

    def check_same(self, other: Vectors) -> None:
        """Raise DataError if the encoder or the width differs."""
        width, other_width = self.values.shape[1], other.values.shape[1]
        if (other.encoder, other_width) != (self.encoder, width):
            raise DataError(
                f"vectors of encoder {other.encoder} (width {other_width}) are compared with those of {self.encoder} "
                f"(width {width})",
                expected="one encoder",
                do="embed both corpora with the same encoder",
            )


def embed_files(
    documents: Sequence[Path], encoder: TextEncoder, max_characters: int, store: UnitStore, executor: Executor,
    advance: Callable[[Unit], Any] = lambda unit: None,
) -> list[NDArray[np.float32]]:  # fmt: skip
    """Return the vectors of each document file [n_documents, d], as memory maps.

    Args:
        documents: Parquet files with the column text, of which the first `max_characters` are embedded.
    """
    settings = {"encoder": encoder.address, "opener": encoder.opener, "max_characters": max_characters}
    model = Input(encoder.path, encoder.address)  # in the key by its address
    units = [Unit((Input.of(path),), covered=(model,)) for path in documents]
    stage = Stage(f"{__name__}:embed_file", VERSION, settings, isolate=True)
    found = store.run(stage, units, executor, advance)
    return [np.load(output.folder / FILE, mmap_mode="r") for output in found]


def embed_file(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the vectors of a document file (a unit's function). Raises DataError: the encoder returns another number."""
    import pyarrow.parquet as pq

    path, model = inputs
    embed: Embed = import_attribute(config["opener"])(model)
    parts = []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH, columns=["text"]):
            texts = [text[: config["max_characters"]] for text in batch["text"].to_pylist()]
            found = np.asarray(embed(texts), np.float32)
            if found.ndim != 2 or len(found) != len(texts):
                raise DataError(
                    f"the encoder {config['encoder']} returned {list(found.shape)} for {len(texts)} texts of {path}",
                    expected=f"[{len(texts)}, d]",
                )
            parts.append(found)
    np.save(out / FILE, np.concatenate(parts) if parts else np.zeros((0, 0), np.float32))
    return {"vectors": sum(map(len, parts))}
