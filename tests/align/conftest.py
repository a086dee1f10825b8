"""Fixtures of this room's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the engine's runners is faster is measured, and they differ in last bits: here it is not left to that."""
    monkeypatch.setenv("WHORL_NATIVE", "0")
