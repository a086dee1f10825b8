"""A server for all tests of the API that only ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.serve.browser_pages import browser, fake, visit  # noqa: F401  (fixtures of the pages' tests)
from tests.support.serve.live_server import Running, api_of, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """One for all tests that only ask; at its end no page may be lost."""
    with running(api_of()) as one:
        yield one
        one.ask(lambda engine: engine.check_integrity())
        assert one.ask(lambda engine: engine.busy) is False
        assert one.api.worker.streams == {} and one.api._limits_by_request == {}
