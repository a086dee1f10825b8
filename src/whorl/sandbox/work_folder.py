"""Contents, size and removal of a folder that an untrusted program filled.

No function may recurse, follow a link, or rely on short paths: a program can nest folders until their path exceeds the
kernel's limit, and can remove its read permission.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whorl.errors import ConfigError

ENTRY_BYTES = 256  # bytes counted per directory entry
FOLDER_BYTES = 4096  # and in addition per folder: a block on most file systems


MAX_FILES = 1000  # that are read
MAX_PATH = 1000  # characters of a path


def check_paths(paths: Iterable[str]) -> None:
    """Raise ConfigError for a path that is absolute, leads out of the folder, names no file, or is a folder of another."""
    names = set(paths)
    folders = {path[:i] for path in names for i, letter in enumerate(path) if letter == "/"}
    for path in names:
        parts = path.split("/")
        if (
            len(path) > MAX_PATH
            or "\0" in path
            or any(part in ("", ".", "..") or len(part) > 100 for part in parts)
            or not path.isprintable()
            or path in folders
        ):
            raise ConfigError(
                f"{path[:100]!r} is no path of a file in the work folder",
                expected=f"a relative path without . and .., of at most {MAX_PATH} characters, such as data/table.csv",
            )


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files (path -> base64 of the content) into an empty folder. The paths are checked."""
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(base64.b64decode(content))


def read_files(folder: Path, most: float) -> tuple[dict[str, str], int]:
    """Return path -> base64 of the regular files of a folder, by path, and the number of files left out.

    Args:
        most: bytes in total. Further files are left out, as are those beyond MAX_FILES or MAX_PATH, and names that are not
            UTF-8. Links are not followed. No process may run in the folder.
    """
    found: dict[str, str] = {}
    left_out, total, pending = 0, 0, [""]
    while pending:
        inside = pending.pop(0)
        with _open_folder(f"{folder}/{inside}") as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            path = f"{inside}/{entry.name}" if inside else entry.name
            if entry.is_dir(follow_symlinks=False):
                if len(path) <= MAX_PATH:
                    pending.append(path)
                continue
            size = entry.stat(follow_symlinks=False).st_size
            if not entry.is_file(follow_symlinks=False):
                continue
            if (
                total + size > most
                or len(found) >= MAX_FILES
                or len(path) > MAX_PATH
                or not path.isprintable()
            ):
                left_out += 1
                continue
            try:
                content = Path(entry.path).read_bytes()
            except PermissionError:
                os.chmod(entry.path, 0o600)  # noqa: PTH101 (a scan's entry is a string)
                content = Path(entry.path).read_bytes()
            found[path] = base64.b64encode(content).decode()
            total += size
    return found, left_out


def used_bytes(folder: Path, most: float = float("inf")) -> float:
    """Return the bytes in a folder, or any number above `most` once they exceed it; infinite if nested too deep."""
    total, pending = 0.0, [str(folder)]
    while pending and total <= most:
        path = pending.pop()
        try:
            with _open_folder(path) as entries:
                for entry in entries:
                    total += ENTRY_BYTES
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            total += FOLDER_BYTES
                            pending.append(entry.path)
                        else:
                            total += entry.stat(follow_symlinks=False).st_size
                    if total > most:
                        break
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return float("inf")
    return total


def is_empty(folder: Path) -> bool:
    with _open_folder(str(folder)) as entries:
        return next(entries, None) is None


def has_many(folder: Path, most: int) -> bool:
    """Return whether a folder and those in it hold more than `most` entries: its removal may take long."""
    seen, pending = 0, [str(folder)]
    while pending:
        with _open_folder(pending.pop()) as entries:
            for entry in entries:
                seen += 1
                if seen > most:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return False


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
    with _open_folder(path) as scan:
        return list(scan)


def _open_folder(path: str) -> Any:
    """Return an open scan of a folder, after restoring its permissions if a program removed them."""
    try:
        return os.scandir(path)
    except PermissionError:
        os.chmod(path, 0o700)  # noqa: PTH101
        return os.scandir(path)
