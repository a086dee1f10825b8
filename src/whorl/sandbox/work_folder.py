"""Size and removal of a folder that an untrusted program filled.

No function may recurse, follow a link, or rely on short paths: a program can nest folders until their path exceeds the
kernel's limit, and can remove its read permission.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from pathlib import Path

ENTRY_BYTES = 256  # bytes counted per directory entry


def used_bytes(folder: Path) -> float:
    """Return the bytes in a folder; infinite if it is nested too deep to be read."""
    total, pending = 0.0, [str(folder)]
    while pending:
        try:
            for entry in _entries(pending.pop()):
                total += ENTRY_BYTES
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return float("inf")
    return total


def clear(folder: Path) -> None:
    """Remove all contents of a folder. Nested folders are first moved up, one level at a time."""
    numbers = itertools.count()
    while entries := _entries(str(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)  # noqa: PTH108 (a scan's entry is a string)
                continue
            for inner in _entries(entry.path):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # noqa: PTH101 (a folder can only be moved by who may write in it)
                    os.rename(inner.path, _unused_path(folder, numbers))  # noqa: PTH104
                else:
                    os.unlink(inner.path)  # noqa: PTH108
            os.rmdir(entry.path)  # noqa: PTH106


def _unused_path(folder: Path, numbers: itertools.count[int]) -> str:
    while os.path.lexists(path := f"{folder}/{next(numbers)}"):
        pass
    return path


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as scan:
            return list(scan)
    except PermissionError:
        os.chmod(path, 0o700)  # noqa: PTH101
        with os.scandir(path) as scan:
            return list(scan)
