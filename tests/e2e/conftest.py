"""The corpus of the end-to-end tests."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with about 1 MB of source code."""
    folder = tmp_path_factory.mktemp("code")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("asyncio", "email", "json", "logging", "unittest", "xml", "http", "importlib", "concurrent"):
        shutil.copytree(library / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "test*"))
    return folder
