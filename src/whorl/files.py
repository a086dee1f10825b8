"""Files that survive a crash: written under another name, flushed to disk, then renamed.

    a reader, or a kill at any moment      meets the old content or the new one, never a part
    a power cut                            the same, because the bytes are on disk before the rename
    an error (a full disk)                 the old content stays, and the unfinished file is removed

The folder's own entry is not flushed by `write_atomic`: after a power cut the old content may be back. A caller for which
that is a loss calls `fsync_path` on the folder.
"""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

from whorl.errors import ConfigError


def write_atomic(path: Path, content: str | bytes, *, staging: Path | None = None, mode: int = 0o666) -> None:
    """Replace a file's content (text as UTF-8) in one step.

    Args:
        staging: folder of the unfinished file, on the same file system; default: that of `path`.
        mode: permissions of the file, less those of the process's umask.

    Raises:
        OSError: the folder does not exist, cannot be written, or is full.
    """
    writer = f"{os.getpid()}-{threading.get_native_id()}"
    unfinished = (staging or path.parent) / f".{path.name}.{writer}"
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def write_output(path: Path, content: bytes) -> None:
    """Write a file that a user named with --out, as `write_atomic` does. Raises ConfigError: it cannot be written."""
    try:
        write_atomic(path, content)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", do="give another path with --out"
        ) from error


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk. File systems that cannot flush a folder are ignored."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
