"""The token set of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.train.tiny import make_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only."""
    return make_tokens(tmp_path_factory.mktemp("tokens"))
