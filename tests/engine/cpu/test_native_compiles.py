"""The other tests of this folder skip without a library, so this one does not."""

from __future__ import annotations

import shutil

import pytest

from whorl.engine.cpu import build


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler here"
)
def test_library_compiles_where_there_is_a_compiler() -> None:
    assert build.library() is not None
