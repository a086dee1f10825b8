"""Reading of GGUF files in tests: fields, and llama.cpp where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")


def llama_cpp(file: Path, **options: Any) -> Any:
    """Load a file with llama.cpp; skip the test if it is not installed."""
    library = pytest.importorskip("llama_cpp")
    return library.Llama(str(file), verbose=False, n_threads=1, n_threads_batch=1, **options)


def field(file: Path, name: str) -> Any:
    """Return the value of a metadata field."""
    return gguf.GGUFReader(file).get_field(name).contents()
