"""Files by local path or fsspec URL: opened, decompressed, measured, listed.

A local path is opened directly; fsspec is imported for URLs only. Compression is chosen by the suffix .gz, .zst or .bz2.

A decompressed stream ends with an error once it is a bomb: more than `BOMB_BYTES`, and more than `BOMB_RATIO` times the
file. The same holds for columnar files (`formats/parquet.py`).
"""

from __future__ import annotations

import bz2
import io
import posixpath
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO

from whorl.errors import ConfigError, DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
DECODED_BYTES = 1024  # per read of a decompressed stream
BOMB_BYTES = 1 << 28
BOMB_RATIO = 400  # text reaches 20; equal records 1,000 in gzip, which is its maximum
# Protocol -> the extra with its client. Those of fsspec itself (file, memory, zip, ...) need none.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def is_url(uri: str) -> bool:
    return "://" in uri


def compression(uri: str) -> str | None:
    """Return "gzip", "zstd", "bz2" or None, by suffix."""
    return COMPRESSIONS.get(posixpath.splitext(uri)[1].lower())


def format_suffix(uri: str) -> str:
    """Return the suffix of the format, without that of the compression: ".jsonl" for "a.jsonl.gz"."""
    stem, suffix = posixpath.splitext(uri)
    return (posixpath.splitext(stem)[1] if suffix.lower() in COMPRESSIONS else suffix).lower()


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises:
        ConfigError: the protocol is unknown, or the package of its client is not installed.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        protocol = url.split("://")[0]
        extra = EXTRAS.get(protocol)
        raise ConfigError(
            f"{url} cannot be opened: {error}",
            expected=f"the extra {extra!r}" if extra else "a local path, or a URL that fsspec supports",
            do=f"pip install 'whorl[{extra}]'"
            if extra
            else "check the protocol, or install its fsspec client",
        ) from error
    return system, path


def open_file(uri: str) -> BinaryIO:
    """Open a seekable binary stream. Raises OSError, and ConfigError as `filesystem`."""
    if not is_url(uri):
        return open(uri, "rb")  # noqa: PTH123 - the caller closes it
    system, path = filesystem(uri)
    stream: BinaryIO = system.open(path, "rb")
    return stream


def file_size(uri: str) -> int:
    """Return the size in bytes. Raises as `open_file`."""
    if not is_url(uri):
        return Path(uri).stat().st_size
    with open_file(uri) as stream:
        return stream.seek(0, io.SEEK_END)


def open_decompressed(uri: str) -> BinaryIO:
    """Open a stream of the content; it is seekable if the file is not compressed.

    Reading damaged data, or a bomb, raises OSError without errno.
    """
    if compression(uri) is None or not (size := file_size(uri)):
        return open_file(uri)
    import pyarrow as pa

    # Unlike the zstd and gzip modules, Arrow's stream bounds its output and reports a truncated end; of bz2, it does not
    # read an empty stream that another follows.
    stream: Any
    if compression(uri) == "bz2":
        stream = bz2.BZ2File(open_file(uri) if is_url(uri) else uri)
    else:
        source = pa.PythonFile(open_file(uri), mode="r") if is_url(uri) else pa.OSFile(uri)
        stream = pa.CompressedInputStream(source, compression(uri))
    return io.BufferedReader(_Bounded(stream, bomb_limit(size)), 1 << 16)


def bomb_limit(size: int, share: float = 1.0) -> int:
    """Return how many bytes may be decoded from `size` bytes, which are this share of a file."""
    return max(int(share * BOMB_BYTES), BOMB_RATIO * size)


def bomb_error(limit: int) -> OSError:
    return OSError(f"more than {limit:,} bytes when decompressed, which is {BOMB_RATIO} times the file")


class _Bounded(io.RawIOBase):
    """A stream of at most `limit` bytes; reading more raises OSError.

    Arrow's stream drops what it decoded in a read that fails. So reads are small, and an error is raised at the next one.
    """

    def __init__(self, stream: Any, limit: int) -> None:
        self.stream, self.limit, self.n_read = stream, limit, 0
        self.error: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.error is not None:
            raise self.error
        view, n = memoryview(buffer), 0
        try:
            while n < len(view) and (found := self.stream.readinto(view[n : n + DECODED_BYTES])):
                n += found
        except (OSError, ValueError, EOFError) as error:
            self.error = error
            if not n:
                raise
        self.n_read += n
        if self.n_read > self.limit:
            raise bomb_error(self.limit)
        return n

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()


def expand_globs(files: Sequence[str]) -> list[str]:
    """Return the names with each pattern (`*`, `?`, `[...]`; local or a URL) replaced by its matches, in order.

    Raises:
        DataError: a pattern has no match.
    """
    expanded: list[str] = []
    for name in files:
        if not any(c in name for c in "*?["):
            expanded.append(name)
            continue
        if is_url(name):
            system, path = filesystem(name)
            matches = [system.unstrip_protocol(match) for match in system.glob(path)]
        else:
            matches = glob(str(Path(name).expanduser()), recursive=True)  # noqa: PTH207 - patterns may be absolute
        if not matches:
            raise DataError(f"no file matches {name}", do="check the pattern and the current folder")
        expanded += sorted(matches)
    return expanded
