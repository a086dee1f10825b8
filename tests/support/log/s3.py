"""A small object store with the protocol of S3, in the memory of the test: it outlives a broker that is killed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    disable_nagle_algorithm = True
    objects: dict[str, bytes]
    lock: threading.Lock

    def do_GET(self) -> None:
        key, query = self._place()
        if "list-type" in query:
            self._list(query)
            return
        with self.lock:
            content = self.objects.get(key)
        if content is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        tag = _tag(content)
        if self.headers.get("If-None-Match") == tag:
            self._answer(304, b"", tag)
        elif bounds := self.headers.get("Range"):
            first, _, last = bounds.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None] if first else content[-int(last) :]
            start = int(first) if first else len(content) - len(part)
            self._answer(
                206, part, tag, **{"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"}
            )
        else:
            self._answer(200, content, tag)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        key, _ = self._place()
        content = self._body()
        with self.lock:
            before = self.objects.get(key)
            absent, same = self.headers.get("If-None-Match"), self.headers.get("If-Match")
            refused = (absent == "*" and before is not None) or (
                same and (before is None or _tag(before) != same)
            )
            if not refused:
                self.objects[key] = content
        if refused:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            self._answer(200, b"", _tag(content))

    def do_DELETE(self) -> None:
        with self.lock:
            self.objects.pop(self._place()[0], None)
        self._answer(204, b"")

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        bucket = self._place()[0].strip("/") + "/"
        after = query.get("start-after", [""])[0]
        with self.lock:
            names = sorted(
                name.removeprefix(bucket) for name in self.objects if name.startswith(bucket + prefix)
            )
            sizes = {name: self.objects[bucket + name] for name in names}
        rows, folders = [], set()
        for name in names:
            rest = name.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folders.add(prefix + rest[: rest.index(delimiter) + 1])
            elif name > after:
                rows.append(
                    f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-30T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(_tag(sizes[name]))}</ETag><Size>{len(sizes[name])}</Size></Contents>"
                )
        rows += [f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders)]
        head = f"<KeyCount>{len(rows)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._answer(200, f"<ListBucketResult>{head}{''.join(rows)}</ListBucketResult>".encode())

    def _place(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).lstrip("/"), parse_qs(parts.query, keep_blank_values=True)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: bytes, tag: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": tag, **headers}.items():
            if value:
                self.send_header(name, value)
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD" and status != 304:
            self.wfile.write(body)

    def handle(self) -> None:
        with suppress(ConnectionError):  # its client was killed
            super().handle()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


@contextmanager
def object_store() -> Iterator[dict[str, str]]:
    """Start the store; yield the environment variables of its clients."""
    handler = type("Handler", (_Handler,), {"objects": {}, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield {
            "AWS_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
