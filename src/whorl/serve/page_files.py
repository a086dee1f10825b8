"""Routes of the pages and of their files, with a content security policy that forbids resources of other hosts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response

from whorl.errors import shorten
from whorl.serve.errors import ApiError

PAGES_FOLDER = Path(__file__).parent / "pages"
MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
PAGE_FILES = frozenset(path.name for path in PAGES_FOLDER.iterdir() if path.suffix in MEDIA_TYPES)
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'"
)


def add_page_routes(app: FastAPI, pages: Mapping[str, str]) -> None:
    """Add GET routes of pages (path -> name of a file), of `/static/NAME` and of the icon.

    They are public in `middleware/admission.py`, so that a page can show its field for the key.
    """

    def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise ApiError(404, f"no page {shorten(name)!r}")
        path = PAGES_FOLDER / name
        headers = {
            "content-security-policy": CONTENT_SECURITY_POLICY,
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
        }
        return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers=headers)

    def add(path: str, name: str) -> None:
        @app.get(path, include_in_schema=False)
        async def page() -> Response:
            return page_file(name)

    for path, name in pages.items():
        add(path, name)

    @app.get("/favicon.ico", include_in_schema=False)
    async def favicon() -> Response:
        return Response(status_code=204)  # the pages have their own icon

    @app.get("/static/{name:path}", include_in_schema=False)
    async def static(name: str) -> Response:
        return page_file(name)
