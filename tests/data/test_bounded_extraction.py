"""Extraction in bounds: hostile pages and PDFs are rejected with a reason, and all others are read."""

from __future__ import annotations

import os
import signal
import zlib
from pathlib import Path

import pytest
from tests.data.formats.test_warc import frame, http, outcome, page, read

from whorl.data.extraction import bounded, extract, run_bounded
from whorl.data.quarantine import BadRecordError
from whorl.errors import ConfigError


def pdf_of(*objects: str) -> bytes:
    """A PDF of these objects, numbered from 1, of which the first is the catalogue."""
    out, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{p:010d} 00000 n \n" for p in places)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    return f"{out}{head}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n".encode(
        "latin-1"
    )


def stream(fields: str, content: str) -> str:
    return f"<< /Length {len(content)} {fields} >>\nstream\n{content}\nendstream"


CATALOGUE, PAGES = "<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>"
PAGE = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R /Resources << /XObject << /X 5 0 R >> >> >>"
FORM = "/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >>"
SELF_REFERENCE = pdf_of(CATALOGUE, PAGES, PAGE, stream("", "/X Do"), stream(FORM, "/X Do /X Do"))


def expanding_pdf() -> bytes:
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(b"(a) Tj " * 100_000) for _ in range(400)) + packer.flush()
    return pdf_of(CATALOGUE, PAGES, PAGE, stream("/Filter /FlateDecode", packed.decode("latin-1")))


HOSTILE = {
    "a PDF that refers to itself": SELF_REFERENCE,
    "options": b"<html><select>" + b"<option>x" * 300_000,
    "attributes": b"<html><p " + b" ".join(b"a%d=1" % n for n in range(200_000)) + b">x",
}


@pytest.fixture
def low_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.5)
    monkeypatch.setattr(bounded, "SECONDS_PER_MB", 0.0)


@pytest.mark.usefixtures("low_bounds")
def test_hostile_pages_cost_themselves_only(tmp_path: Path) -> None:
    bodies = [page("first"), *HOSTILE.values(), page("last")]
    found = read(tmp_path, b"".join(frame(http(body)) for body in bodies), longest=1 << 24)
    assert [outcome(r) for r in found] == ["first", "too_costly", "too_costly", "too_costly", "last"]
    assert isinstance(found[1].value, BadRecordError) and "CPU time" in str(found[1].value)


def test_memory_of_an_expanding_pdf_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MEMORY_BYTES", 400 << 20)
    monkeypatch.setattr(bounded, "_child", None)  # a new one has the bound
    with pytest.raises(BadRecordError, match="more than 400 MB"):
        extract(expanding_pdf(), "application/pdf")
    with pytest.raises(BadRecordError, match="more than 400 MB"):
        run_bounded(bytearray, 1 << 30, n_bytes=0)
    assert extract(page("after"), "text/html").text == "after"


def fail_with(name: str) -> None:
    raise ConfigError(name)


def test_errors_of_the_function_are_raised() -> None:
    with pytest.raises(ConfigError, match="in the child"):
        run_bounded(fail_with, "in the child", n_bytes=0)
    with pytest.raises(BadRecordError) as caught:
        extract(b"%PDF-1.7 and no more", "")
    assert caught.value.reason == "damaged"


def kill_once(path: str) -> int:
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    pid = run_bounded(kill_once, str(tmp_path / "mark"), n_bytes=0)
    assert pid != os.getpid() and run_bounded(os.getpid, n_bytes=0) == pid  # one child for all calls
    os.kill(pid, signal.SIGKILL)
    assert run_bounded(os.getpid, n_bytes=0) not in (pid, os.getpid())
