"""Debian's documentation as real pages: fetched with apt-get, unpacked with dpkg, and as a web archive.

docs = unpacked(args.docs, REFERENCE, scratch)     # exits with 77 where nothing can be fetched
"""

from __future__ import annotations

import gzip
import html
import re
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

POLICY = ("debian-policy",)
REFERENCE = tuple(
    f"debian-reference-{language}" for language in ("de", "en", "fr", "it", "ja", "zh-cn", "zh-tw")
)
MANUALS = ("python3.11-doc", "linux-doc-6.1")  # with the plain sources of their pages
SOURCE_HEAD = "WARC-Type: response\r\nWARC-Date: 2026-11-24T00:00:00Z\r\n"


def unpacked(folder: Path | None, packages: Iterable[str], scratch: Path) -> Path:
    """Return `folder`, or a folder in `scratch` with the files of these packages.

    Raises:
        SystemExit: 77, the packages cannot be fetched here.
    """
    if folder is not None:
        return folder
    debs, found = scratch / "debs", scratch / "docs"
    debs.mkdir(parents=True)
    try:
        subprocess.run(
            ["apt-get", "download", *packages], cwd=debs, check=True, capture_output=True, timeout=300
        )
        for deb in sorted(debs.glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(deb), str(found)], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"Debian's packages cannot be fetched ({type(error).__name__}); give --docs FOLDER")
        sys.exit(77)
    return found


def page_files(folder: Path) -> list[Path]:
    """Return the HTML and PDF files below a folder, without links to others."""
    files = (p for p in folder.rglob("*") if re.search(r"\.(html|pdf)(\.gz)?$", p.name))
    return sorted(p for p in files if p.is_file() and not p.is_symlink())


def body(path: Path) -> bytes:
    """Return the content of a file, decompressed."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def write_warc(pages: Mapping[str, bytes], path: Path) -> None:
    """Write a compressed web archive with a response for each URL."""
    with path.open("wb") as out:
        for url, data in pages.items():
            kind = "application/pdf" if data.startswith(b"%PDF-") else "text/html"
            answer = (
                f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            head = (
                f"WARC/1.0\r\n{SOURCE_HEAD}WARC-Record-ID: <urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, url)}>\r\n"
                f"WARC-Target-URI: {url}\r\nContent-Type: application/http; msgtype=response\r\n"
                f"Content-Length: {len(answer)}\r\n\r\n"
            )
            out.write(gzip.compress(head.encode() + answer + b"\r\n\r\n", 1, mtime=0))


def word_f1(text: str, reference: str) -> float:
    """F1 of the words of two texts, as multisets."""
    found, expected = (Counter(re.findall(r"\w+", t.lower())) for t in (text, reference))
    return 2 * (found & expected).total() / max(1, found.total() + expected.total())


def plain(page: Path) -> str:
    """Return a page without tags: navigation, code and all."""
    text = re.sub(r"(?s)<(script|style).*?</\1>", "", page.read_text("utf-8"))
    return html.unescape(re.sub(r"<[^>]+>", " ", text))


def reference_pages(folder: Path) -> dict[tuple[str, str], Path]:
    """Return (chapter, language) -> page of debian-reference."""
    found = {}
    for path in sorted(folder.rglob("*.html")):
        if match := re.fullmatch(r"(.+)\.([a-z-]+)\.html", path.name):
            found[match[1], match[2]] = path
    return found
