"""Which callers a local server accepts."""

from __future__ import annotations

import pytest

from whorl.http.hosts import cross_site_problem, http_address, is_local_name, is_loopback


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.2:8000", "localhost", "LOCALHOST:80", "[::1]", "[::1]:8000"]
)
def test_local_names_are_accepted(host: str) -> None:
    assert is_local_name(host)


@pytest.mark.parametrize(
    "host",
    ["", "evil.com", "[::1].evil", "[::1", "::1.evil", "localhost.evil", "127.0.0.1.evil", "localhost:x"],
)
def test_other_names_are_rejected(host: str) -> None:
    assert not is_local_name(host)


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.2", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "example.org")))


def test_cross_site_requests_are_named() -> None:
    json = {"content-type": "application/json; charset=utf-8", "host": "localhost:8000"}
    assert cross_site_problem("POST", json) == ""
    assert cross_site_problem("POST", {**json, "origin": "http://localhost:8000"}) == ""
    for origin in ("http://evil.com", "http://[", "null", "localhost:8000", ""):
        assert "Origin" in cross_site_problem("GET", {**json, "origin": origin})
    assert "content-type" in cross_site_problem("POST", {**json, "content-type": "text/plain"})


def test_http_address_opens_in_a_browser() -> None:
    hosts = {
        "127.0.0.1": "127.0.0.1",
        "0.0.0.0": "127.0.0.1",
        "::": "127.0.0.1",
        "::1": "[::1]",
        "a.b": "a.b",
    }
    assert all(http_address(host, 80) == f"http://{shown}:80" for host, shown in hosts.items())
