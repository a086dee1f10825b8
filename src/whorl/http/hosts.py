"""Which callers a server without keys accepts: its own machine, and no web page of another site.

A browser sends requests for any page that it shows. Two checks keep pages away from a server on the same machine:

    the Host header is a local name               DNS rebinding: a page's own name that points to 127.0.0.1
    Origin is the server's own, bodies are JSON   cross-site requests, which need no answer to do harm
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Mapping

from whorl.errors import shorten

LOCAL_NAME = re.compile(r"(127(\.\d{1,3}){3}|localhost|\[::1\])(:\d{1,5})?")


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def http_address(host: str, port: int) -> str:
    """Return the URL that opens a server which listens on `host`; for an address of all interfaces, that of this machine."""
    if host in ("0.0.0.0", "::"):
        return f"http://127.0.0.1:{port}"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def print_pages(url: str, *more: str) -> None:
    """Print the addresses of the pages and of the API to the standard error. more: paths of further pages."""
    pages = "".join(f"{name:<8}{url}/{name}\n" for name in ("engine", *more))
    print(f"page    {url}/\n{pages}API     {url}/v1", file=sys.stderr, flush=True)


def is_local_name(host_header: str) -> bool:
    """Return whether a Host header names this machine, with or without a port."""
    return LOCAL_NAME.fullmatch(host_header.lower()) is not None


def cross_site_problem(method: str, headers: Mapping[str, str]) -> str:
    """Return why a request may come from a web page of another site, or "". headers: names in lower case."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return f"the Origin {shorten(origin)!r} is another site"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        return "a POST needs the header content-type: application/json"
    return ""
