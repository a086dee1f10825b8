"""Files of others: only regular ones are read, since a link to a device has no end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
