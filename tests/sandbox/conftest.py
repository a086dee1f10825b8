"""Fixtures of the sandbox's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from whorl.sandbox import ResourceLimits, Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """One worker with long time limits, since the machine may be busy, and the other limits small."""
    limits = ResourceLimits(
        wall_seconds=20, cpu_seconds=20, memory_bytes=128 << 20, file_bytes=64 << 10, output_bytes=4096
    )
    with Sandbox(limits, workers=1) as sandbox:
        yield sandbox
