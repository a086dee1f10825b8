"""Reading of GGUF files in tests: fields, and llama.cpp where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")
# Fields that llama.cpp's converter writes for some models; they detect changes without llama.cpp.
FIELDS: dict[str, Any] = json.loads(Path(__file__).with_name("gguf_fields.json").read_text())


def llama_cpp(file: Path, **options: Any) -> Any:
    """Load a file with llama.cpp; skip the test if it is not installed."""
    library = pytest.importorskip("llama_cpp")
    return library.Llama(str(file), verbose=False, n_threads=1, n_threads_batch=1, **options)


def field(file: Path, name: str) -> Any:
    """Return the value of a metadata field."""
    return gguf.GGUFReader(file).get_field(name).contents()
