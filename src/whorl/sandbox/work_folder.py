"""A folder that a foreign program filled: how much lies there, and clearing it.

Nothing here may recurse, follow a link, or rely on a path being short: a program can nest folders until their path is
longer than the kernel takes, and take away its own right to read them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from pathlib import Path

ENTRY_BYTES = 256  # what a name is counted as


def used_bytes(folder: Path) -> float:
    """Bytes that lie in a folder; infinite where it is nested too deep to be looked through."""
    total, waiting = 0.0, [str(folder)]
    while waiting:
        try:
            for entry in _entries(waiting.pop()):
                total += ENTRY_BYTES
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return float("inf")
    return total


def clear(folder: Path) -> None:
    """Removes all that lies in a folder: what is nested is drawn up first, one level at a time."""
    fresh = itertools.count()
    while found := _entries(str(folder)):
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)  # noqa: PTH108 (a scan's entry is a string)
                continue
            for inner in _entries(entry.path):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # noqa: PTH101 (a folder can only be moved by who may write in it)
                    os.rename(inner.path, _unused_path(folder, fresh))  # noqa: PTH104
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
