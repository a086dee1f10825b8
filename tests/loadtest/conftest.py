"""The server fixture of the serve room, for the load test of a real server."""

from __future__ import annotations

from tests.support.serve.live_server import server  # noqa: F401  (a fixture)
