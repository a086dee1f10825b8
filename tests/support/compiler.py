"""Mark of the tests that need native code, which they compile when they run, and not at collection."""

from __future__ import annotations

import pytest

from whorl.machine.native_build import BuildError, find_compiler, is_enabled


def _is_missing() -> bool:
    try:
        return not (is_enabled() and find_compiler())
    except BuildError:
        return True


needs_compiler = pytest.mark.skipif(_is_missing(), reason="there is no C++ compiler here")
