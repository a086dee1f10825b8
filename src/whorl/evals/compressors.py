"""Size of the held-out files under general compressors: the baseline of a language model.

A model that gives the next symbol the probability p lets an arithmetic coder write it in -log2 p bits. So bits per byte
of unseen text compare models and compressors directly, independent of the vocabulary (Shannon 1951, Prediction and
Entropy of Printed English; Delétang et al. 2024, Language Modeling Is Compression).

The subtle part is the data that each side has seen. A trained model has seen the training split and scores every
held-out file alone. A plain compressor has seen nothing, but learns from earlier held-out files in one stream. So there
are four settings:

* `one stream`: all held-out files concatenated; no training split.
* `file by file`: every file alone, including the container's header.
* `dictionary`: file by file, with a dictionary of 110 KB made from the training split.
* `primed`: the training split first, then all held-out files as one stream; only the added bytes count. This is the
  strongest setting: the compressor also learns from the held-out files.

PPMd (Shkarin 2002, PPM: one step to practicality) is an n-gram model of order 10, here with enough memory to keep all its
statistics. It alone is primed: xz took 13.6 s for 27 MB of source code, PPMd 4.0, and both came to the same size within
4 % (1.190 and 1.149 bits per byte). C libraries do the work without the interpreter lock, so threads run in parallel.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass

from whorl.errors import DataError

PPMD_ORDER = 10
DICTIONARY_BYTES = 112_640  # zstd's default size of a trained dictionary
_DICTIONARY_SAMPLE = 100_000_000  # bytes, to bound the time: 28 MB take a second, and more data helps
_XZ_DICTIONARY = 64 << 20  # bytes of the look-back of `xz -9`
_PPMD_BYTES_PER_INPUT_BYTE = (
    24  # model memory per byte of input: order 10 used under 10 on 31 MB of source code
)
_PPMD_MEMORY = (64 << 20, 1 << 30)
_XZ_PRESET = 9 | lzma.PRESET_EXTREME


@dataclass(frozen=True)
class CompressionResult:
    """One method's size for the held-out files.

    Attributes:
        method: display name, such as "xz -9e".
        setting: "one stream", "file by file", "dictionary" or "primed".
        compressed_bytes: compressed size of the held-out files.
        raw_bytes: their uncompressed size.
        seconds: wall-clock time of this measurement, with others running in parallel.
    """

    method: str
    setting: str
    compressed_bytes: int
    raw_bytes: int
    seconds: float

    @property
    def bits_per_byte(self) -> float:
        return 8 * self.compressed_bytes / self.raw_bytes

    @property
    def name(self) -> str:
        return f"{self.method}, {self.setting}"


def measure_compressors(
    held_out: Sequence[bytes],
    train: Sequence[bytes] = (),
    *,
    pool: Executor | None = None,
    on_result: Callable[[CompressionResult], None] | None = None,
) -> list[CompressionResult]:
    """Return the size of the held-out files under every method, in a fixed order.

    Args:
        held_out: the files' bytes; empty files are ignored.
        train: the training split's files; without it the dictionary and primed settings are skipped.
        pool: threads that compress; by default two.
        on_result: called with each result, for a progress bar.

    Raises:
        DataError: the held-out files have no bytes.
    """
    held_out = [text for text in held_out if text]
    if not held_out:
        raise DataError(
            "nothing to compress: the held-out split is empty",
            expected="at least one file with at least one byte",
            do="raise curate's test_bytes, or ingest more documents",
        )
    stream, primer = b"".join(held_out), b"".join(train)
    # (method, setting, size), the longest jobs first, so that the pool does not end with one of them.
    jobs: list[tuple[str, str, Callable[[], int]]] = []
    if primer:
        jobs += [
            (f"PPMd order {PPMD_ORDER}", "primed", lambda: ppmd_size(stream, primer)),
            ("zstd -19", "dictionary", lambda: _zstd_dictionary(held_out, train)),
        ]
    jobs += [
        ("xz -9e", "one stream", lambda: _xz(stream)),
        ("xz -9e", "file by file", lambda: sum(map(_xz, held_out))),
        ("gzip -9", "one stream", lambda: _gzip(stream)),
        ("gzip -9", "file by file", lambda: sum(map(_gzip, held_out))),
        ("bzip2 -9", "one stream", lambda: len(bz2.compress(stream, 9))),
        ("zstd -19", "one stream", lambda: _zstd(stream)),
        ("zstd -19", "file by file", lambda: sum(map(_zstd, held_out))),
        (f"PPMd order {PPMD_ORDER}", "one stream", lambda: ppmd_size(stream)),
        (f"PPMd order {PPMD_ORDER}", "file by file", lambda: sum(map(ppmd_size, held_out))),
    ]

    def timed(method: str, setting: str, size: Callable[[], int]) -> CompressionResult:
        start = time.perf_counter()
        return CompressionResult(method, setting, size(), len(stream), time.perf_counter() - start)

    results: list[CompressionResult] = []
    with nullcontext(pool) if pool is not None else ThreadPoolExecutor(2) as threads:
        for future in as_completed([threads.submit(timed, *job) for job in jobs]):
            results.append(future.result())
            if on_result is not None:
                on_result(results[-1])
    return sorted(results, key=lambda result: -result.bits_per_byte)


def ppmd_size(stream: bytes, primer: bytes = b"") -> int:
    """Return the bytes that PPMd (variant H, order 10) adds for `stream` after it has coded `primer`."""
    import pyppmd

    minimum, maximum = _PPMD_MEMORY
    memory = min(maximum, max(minimum, _PPMD_BYTES_PER_INPUT_BYTE * (len(primer) + len(stream))))
    encoder = pyppmd.Ppmd7Encoder(PPMD_ORDER, memory)
    before = len(encoder.encode(primer)) if primer else 0
    total = before + len(encoder.encode(stream)) + len(encoder.flush())
    return total - before


def _xz(data: bytes) -> int:
    # No look-back beyond the data: the same output, without tables of 64 MB for each file.
    size = max(4096, min(len(data), _XZ_DICTIONARY))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": _XZ_PRESET, "dict_size": size}]
    return len(lzma.compress(data, filters=filters))


def _gzip(data: bytes) -> int:
    return len(gzip.compress(data, 9, mtime=0))


def _zstd(data: bytes) -> int:
    import zstandard

    return len(zstandard.ZstdCompressor(level=19).compress(data))


def _zstd_dictionary(held_out: Sequence[bytes], train: Sequence[bytes]) -> int:
    """Compress every file alone, with a dictionary trained on up to 100 MB of the training split."""
    import zstandard

    samples: list[bytes | bytearray | memoryview] = []
    total = 0
    # A stride over the split instead of its beginning: neighboring files are similar.
    stride = max(1, -(-sum(map(len, train)) // _DICTIONARY_SAMPLE))
    for text in train[::stride]:
        samples.append(
            text[:131_072]
        )  # so that long files do not dominate: 1.363 bits per byte against 1.367
        total += len(samples[-1])
    size = min(DICTIONARY_BYTES, max(256, total // 10))
    try:
        dictionary = zstandard.train_dictionary(size, samples)
    except zstandard.ZstdError:  # too few samples to train on: use the split as a raw dictionary
        dictionary = zstandard.ZstdCompressionDict(b"".join(train)[-DICTIONARY_BYTES:])
    compressor = zstandard.ZstdCompressor(level=19, dict_data=dictionary)
    return sum(len(compressor.compress(text)) for text in held_out)
