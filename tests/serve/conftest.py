"""Fixtures of the serve room: a live server, a browser and a scripted server for the pages."""

from __future__ import annotations

from tests.support.serve.browser_pages import browser, fake, page, visit  # noqa: F401  (fixtures)
from tests.support.serve.live_server import server  # noqa: F401  (a fixture)
