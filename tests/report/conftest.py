"""The browser of the page tests."""

from __future__ import annotations

from tests.support.serve.browser_pages import browser  # noqa: F401  (a fixture)
