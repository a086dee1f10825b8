"""Word, EPUB and notebooks: small files as their programs write them, and broken, encrypted and hostile ones."""

from __future__ import annotations

import contextlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whorl.data.extraction import zipped
from whorl.data.extraction.zipped import extract_docx, extract_epub
from whorl.data.formats import open_format
from whorl.data.quarantine import BadRecordError

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" xmlns:mc="mc"'
RELS = '<Relationships xmlns="r"><Relationship Type="x/officeDocument" Target="word/document2.xml"/></Relationships>'
BODY = """<w:p><w:pPr><w:tabs><w:tab w:val="left"/></w:tabs></w:pPr><w:r><w:t>A </w:t></w:r><w:r><w:t>title</w:t></w:r></w:p>
<w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p><w:p><w:r><w:t>b</w:t></w:r></w:p></w:tc><w:tc><w:p/></w:tc>
<w:tc><w:p><w:r><w:t>1</w:t></w:r></w:p></w:tc></w:tr></w:tbl>
<w:p><w:del><w:r><w:delText>old</w:delText></w:r></w:del><w:ins><w:r><w:t>x</w:t><w:tab/><w:t>y</w:t><w:br/><w:t>z</w:t></w:r></w:ins></w:p>
<mc:AlternateContent><mc:Choice><w:t>box</w:t></mc:Choice><mc:Fallback><w:t>box</w:t></mc:Fallback></mc:AlternateContent>"""


def packed(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def docx(path: Path, body: str = BODY, head: str = "") -> Path:
    document = f"{head}<w:document {W}><w:body>{body}</w:body></w:document>"
    return packed(path, {"_rels/.rels": RELS, "word/document2.xml": document})


def epub(path: Path, **more: str) -> Path:
    container = (
        '<container xmlns="c"><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    )
    package = """<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="dc"><metadata><dc:title>A book</dc:title></metadata>
    <manifest><item id="b" href="two%20b.xhtml" media-type="application/xhtml+xml"/>
    <item id="c" properties="nav" href="nav.xhtml" media-type="text/html"/>
    <item id="a" href="text/one.xhtml" media-type="application/xhtml+xml"/>
    <item id="n" href="nav.xhtml" media-type="application/xhtml+xml"/>
    <item id="s" href="s.css" media-type="text/css"/></manifest><spine><itemref idref="c"/>
    <itemref idref="a"/><itemref idref="n" linear="no"/>
    <itemref idref="b"/><itemref idref="none"/></spine></package>"""
    page = "<html><head><title/></head><body><p>{}</p></body></html>"
    files = {
        "META-INF/container.xml": container,
        "OEBPS/book.opf": package,
        "OEBPS/nav.xhtml": page.format("nav"),
    }
    files |= {"OEBPS/text/one.xhtml": page.format("eins"), "OEBPS/two b.xhtml": page.format("zwei")}
    return packed(path, files | {"META-INF/" + name: text for name, text in more.items()})


def value_of(path: Path) -> Any:
    (record,) = open_format(str(path)).records(str(path))
    return record.value


def test_word_document_is_paragraphs_and_rows(tmp_path: Path) -> None:
    found = value_of(docx(tmp_path / "a.docx"))
    assert found["text"] == "A title\na b\t\t1\nx\ty\nz\nbox"


def test_book_is_read_in_the_order_of_its_spine(tmp_path: Path) -> None:
    found = value_of(epub(tmp_path / "a.epub"))
    assert (found["text"], found["title"], found["media_type"]) == (
        "eins\n\nzwei",
        "A book",
        "application/epub+zip",
    )


ENCRYPTION = '<encryption><EncryptedData><CipherReference URI="{}"/></EncryptedData></encryption>'


def test_encrypted_and_broken_archives_have_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.docx").write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600))
    (tmp_path / "no.docx").write_bytes(b"neither")
    good = docx(tmp_path / "good.docx").read_bytes()
    (tmp_path / "cut.docx").write_bytes(good[: len(good) // 2])
    at = good.index(b"word/document2.xml") + 40
    (tmp_path / "flip.docx").write_bytes(good[:at] + bytes(8) + good[at + 8 :])
    packed(tmp_path / "other.docx", {"a": "b"})
    entity = '<!DOCTYPE a [<!ENTITY b "cccc"><!ENTITY d "&b;&b;">]>'
    docx(tmp_path / "entity.docx", "<w:t>&d;</w:t>", head=entity)
    docx(tmp_path / "deep.docx", "<w:p>" * 3000 + "</w:p>" * 3000)
    epub(tmp_path / "locked.epub", **{"encryption.xml": ENCRYPTION.format("OEBPS/two%20b.xhtml")})
    epub(tmp_path / "font.epub", **{"encryption.xml": ENCRYPTION.format("OEBPS/font.otf")})
    reasons = {p.name: getattr(value_of(p), "reason", "") for p in sorted(tmp_path.glob("*.*"))}
    assert reasons == {
        "old.docx": "encrypted", "no.docx": "damaged", "cut.docx": "damaged", "flip.docx": "damaged",
        "other.docx": "damaged", "entity.docx": "damaged", "deep.docx": "too_costly",
        "locked.epub": "encrypted", "font.epub": "", "good.docx": "",
    }  # fmt: skip
    monkeypatch.setattr(zipped, "MAX_BYTES", 1 << 20)
    bomb = docx(tmp_path / "bomb.docx", f"<w:p><w:t>{'x' * (3 << 20)}</w:t></w:p>")
    with pytest.raises(BadRecordError, match="over 1048576 bytes when decompressed"):
        extract_docx(bomb.read_bytes())
    with pytest.raises(BadRecordError, match="no META-INF"):
        extract_epub(bomb.read_bytes())


@settings(suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([docx, epub]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6),
    st.floats(0, 1),
)
def test_damaged_archives_are_read_or_have_a_reason(
    tmp_path: Path, write: Any, flips: list[tuple[float, int]], end: float
) -> None:
    data = bytearray(write(tmp_path / "a").read_bytes())
    for place, byte in flips:
        data[int(place * (len(data) - 1))] = byte
    with contextlib.suppress(BadRecordError):
        (extract_docx if write is docx else extract_epub)(
            bytes(data[: len(data) if end > 0.3 else int(end * len(data))])
        )


CELLS: list[dict[str, Any]] = [
    {"cell_type": "markdown", "source": ["# Title\n", "text"]}, {"cell_type": "raw", "source": "raw"},
    {"cell_type": "code", "source": "x = 1\nx", "outputs": [{"data": {"image/png": "A" * 99}}]},
    {"cell_type": "code", "source": []},
]  # fmt: skip


def test_notebook_is_markdown_and_code_without_outputs(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    text = "# Title\ntext\n\n```{}\nx = 1\nx\n```"
    path.write_text(json.dumps({"cells": CELLS, "metadata": {"language_info": {"name": "python"}}}))
    assert value_of(path)["text"] == text.format("python")
    path.write_text(json.dumps({"cells": CELLS, "metadata": {"kernelspec": {"language": "R"}}}))
    assert value_of(path)["text"] == text.format("R")
    old = [{**cell, "input": cell["source"]} for cell in CELLS]
    path.write_text(json.dumps({"worksheets": [{"cells": old}]}))
    assert value_of(path)["text"] == text.format("")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"cells": 3}', '{"cells": [3]}', '{"cells": [{"source": 1}]}']
)
def test_broken_notebook_is_bad_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(content)
    assert value_of(tmp_path / "a.ipynb").reason == "bad_json"
