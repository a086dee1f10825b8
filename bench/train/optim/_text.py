"""A text for `--smoke`, in place of the play."""

from __future__ import annotations

import atexit
import statistics
import tempfile
from pathlib import Path


def make_text() -> Path:
    """Write 200 kB of the standard library's source to a temporary file, removed at exit."""
    source = "".join(path.read_text() for path in sorted(Path(statistics.__file__).parent.glob("[a-d]*.py")))
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write("".join(c for c in source if c.isascii())[:200_000])
    path = Path(file.name)
    atexit.register(path.unlink, missing_ok=True)
    return path
