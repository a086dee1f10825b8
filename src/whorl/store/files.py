"""Files of others, and the errors of a disk.

Only regular files are read, since a link to a device has no end.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from whorl.errors import DiskFullError, StoreError, WhorlError


def require_regular(path: Path) -> Path:
    """Return `path` unless it is a folder, a device or a pipe; a missing file is left to the caller.

    Raises:
        OSError: it is one.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file")
    return path


def load_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: it cannot be read. ValueError: it is not JSON in UTF-8, or nested too deeply.
    """
    try:
        return json.loads(require_regular(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def wrap_os_error(error: BaseException, root: Path) -> BaseException:
    """Return a DiskFullError or StoreError for a full or read-only disk; return any other error unchanged.

    Libraries wrap "disk full" in their own errors, so the message is checked as well as the error number.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, WhorlError) or not isinstance(error, Exception):
        return error
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
        free = shutil.disk_usage(next(place for place in (root, *root.parents) if place.exists())).free
        return DiskFullError(
            f"the disk of the store {root} is full ({free / 1e6:,.0f} MB left): {error}",
            do="free some space (`whorl gc` lists what can be removed) and run the same command again; "
            "finished work is kept",
        )
    if number in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR) and _names_path_in_store(
        error, root
    ):
        return StoreError(
            f"the store {root} cannot be written: {error}",
            do="use a writable folder: --store FOLDER, or WHORL_HOME=FOLDER",
        )
    return error


def _names_path_in_store(error: BaseException, root: Path) -> bool:
    """Return whether an OSError names a file in the store, the store's folder, or a folder above it."""
    name = getattr(error, "filename", None)
    if name is None:
        return False
    path = Path(os.fsdecode(name)).absolute()
    return path.is_relative_to(root) or root.is_relative_to(path)
