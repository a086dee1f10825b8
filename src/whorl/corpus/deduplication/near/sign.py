"""Signatures of documents and the keys of their bands: the map stage `sign`, and what later stages read of it.

A unit writes the signatures of a document file into one array, [n_documents, hashes]. Of each hash it has the lower 16
bits (b-bit minwise hashing, Li & König 2010), which agree by chance once in 65,536. The keys of all bands are divided into
partitions, each a range of the keys. The file of a partition has two arrays for each block of texts: the lower 32 bits of
the keys, by document, and how many each document has. Its last array is a digest of the signatures that `join` reads. Keys
that differ in the other bits only cost a comparison of signatures. Memory does not grow with the documents of a file.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.near.arrays import read_arrays, write_arrays, write_parts
from whorl.corpus.deduplication.near.minhash import (
    band_keys,
    divided_keys,
    minhash_signatures,
    signature_digests,
)
from whorl.corpus.deduplication.settings import MinHashConfig
from whorl.corpus.deduplication.shingles import TextBlock
from whorl.corpus.mapreduce import Output, partition_name
from whorl.data.formats import format_name

SIGNATURES = "signatures"


def stage_settings(config: Mapping[str, Any]) -> MinHashConfig:
    """Return the settings that are part of a stage's configuration."""
    return MinHashConfig(**{k: v for k, v in config.items() if k in MinHashConfig.model_fields})


def count_rows(path: str) -> int:
    """Return the number of documents of a file."""
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)


def text_files(path: str) -> NDArray[np.int64]:
    """Return a hash of each document's source and path if it is (a piece of) a text file, else 0: [n_documents].

    Pieces of one text may have a common header and are no duplicates. Records of other formats may be duplicates.
    """
    import pyarrow.parquet as pq

    if not {"source", "path"} <= set(pq.read_schema(path).names):
        return np.zeros(count_rows(path), np.int64)
    table = pq.read_table(path, columns=["source", "path"])
    pairs = zip(table["source"].to_pylist(), table["path"].to_pylist(), strict=True)
    return np.fromiter((_text_file(*pair) for pair in pairs), np.int64, len(table))


@functools.lru_cache(maxsize=1 << 12)
def _text_file(source: str, path: str) -> int:
    digest = hashlib.blake2b(f"{source}\0{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True) if format_name(path) == "text" else 0


def sign(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Map: write the signatures of a document file, and the keys of their bands by partition."""
    settings, partitions = stage_settings(config), int(config["partitions"])
    read = [hashlib.blake2b(digest_size=16) for _ in range(partitions)]
    documents = shingles = 0
    kind = np.uint8 if settings.bands < 256 else np.uint16

    def signatures() -> Iterator[NDArray[np.uint16]]:
        nonlocal documents, shingles
        for texts in _text_blocks(inputs[0], settings):
            signed = minhash_signatures(texts, settings)
            keys, counts, first = divided_keys(band_keys(signed, settings), partitions)
            lower = signed.astype(np.uint16)
            digests = signature_digests(lower)
            for number, own in enumerate(counts.astype(kind)):
                read[number].update(digests[own > 0].tobytes())
                some = keys[first[number] : first[number + 1]]
                write_arrays(out / partition_name(number), some, own, append=True)
            documents += len(texts)
            shingles += int((texts.ends - texts.starts).sum()) // 6 + len(texts)
            yield lower

    write_parts(out / SIGNATURES, (count_rows(inputs[0]), settings.hashes), np.uint16, signatures())
    for number, digest in enumerate(read):  # the signatures are not part of the key of `join`
        write_arrays(out / partition_name(number), np.frombuffer(digest.digest(), np.uint8), append=True)
    return {"documents": documents, "shingles": shingles}


def partition_names(signed: Sequence[Output]) -> list[str]:
    """Return the names of all partitions."""
    return sorted({name for output in signed for name in output.files} - {SIGNATURES})


def read_records(
    paths: Sequence[str], signatures: Sequence[NDArray[np.uint16]], is_chosen: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:  # fmt: skip
    """Return the keys of bands in a partition, and the document of each, counted over all files: [n], [n].

    Args:
        is_chosen: [n_documents] whose records are returned; default all.
    """
    size = sum(len(keys) for path in paths for keys in read_arrays(path)[:-1:2])
    keys, documents = np.empty(size, np.uint32), np.empty(size, np.int64)
    begin = first = 0
    for path, signed in zip(paths, signatures, strict=True):
        arrays, at = read_arrays(path), first
        for own, counts in zip(arrays[:-1:2], arrays[1::2], strict=True):
            numbers = np.repeat(np.arange(at, at + len(counts), dtype=np.int64), counts)
            some = slice(None) if is_chosen is None else is_chosen[numbers]
            end = begin + len(numbers[some])
            keys[begin:end], documents[begin:end] = own[some], numbers[some]
            begin = end
            at += len(counts)
        first += len(signed)
    return keys[:begin], documents[:begin]


def _text_blocks(path: str, config: MinHashConfig) -> Iterator[TextBlock]:
    """Yield the texts of a document file in blocks."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            texts = TextBlock.of_column(file.read_row_group(group, columns=["text"])["text"], config)
            for begin, end in texts.blocks():
                yield texts.part(begin, end)
