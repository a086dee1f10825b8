"""Extraction: encodings, HTML, PDF and normalisation, with the bad input of the web."""

from __future__ import annotations

import sys
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.data.extraction import decode, extract, extract_html, extract_pdf
from whorl.data.extraction.normalise import STEPS, normalise, repair_mojibake
from whorl.data.quarantine import BadRecordError

ARTICLE = "A text of the page that is long enough to be taken for content, with words and more words. " * 3
RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю. " * 4
JAPANESE = "これは日本語の文章です。文字コードを調べます。" * 4


def meta(name: str) -> bytes:
    return f'<meta charset="{name}">'.encode()


@pytest.mark.parametrize(
    ("data", "declared", "expected"),
    [
        (b"\xef\xbb\xbf" + "é".encode(), "latin-1", "é"),
        ("é".encode("utf-16"), "utf-8", "é"),
        ("é".encode(), "iso-8859-1", "é"),  # valid UTF-8, whatever was declared
        (RUSSIAN.encode("cp1251"), "windows-1251", RUSSIAN),
        (RUSSIAN.encode("cp1251"), "", RUSSIAN),
        (RUSSIAN.encode("koi8-r"), "utf-8", RUSSIAN),  # a false declaration
        (RUSSIAN.encode("koi8-r"), "no such encoding", RUSSIAN),
        (JAPANESE.encode("shift_jis"), "", JAPANESE),
        (JAPANESE.encode("euc_jp"), "x-nonsense", JAPANESE),
        (JAPANESE.encode("iso2022_jp"), "iso-2022-jp", JAPANESE),
        ("联通".encode("gbk"), "gb2312", "联通"),  # also valid as UTF-8
        (b"it\x92s", "iso-8859-1", "it’s"),  # browsers read Latin-1 as Windows-1252
        (b"plain", "utf-16", "plain"),
        (b"plain", "rot13", "plain"),
        ("für alle".encode()[:2], "utf-8", "f"),  # cut inside a character
        ("ü".encode() * 50 + b"\xff", "utf-8", "ü" * 50 + "\ufffd"),
        (b"", "", ""),
    ],
)
def test_decode(data: bytes, declared: str, expected: str) -> None:
    assert decode(data, declared) == expected


def test_decode_reads_meta_and_xml_declaration() -> None:
    for head in (meta("windows-1251"), b'<?xml version="1.0" encoding="windows-1251"?>'):
        data = head + "да".encode("cp1251")
        assert decode(data, is_html=True) == head.decode() + "да"
    pragma = b'<meta http-equiv="Content-Type" content="text/html; charset=shift_jis">'
    assert decode(pragma + "日本".encode("shift_jis"), is_html=True).endswith("日本")


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4, b"\0" * 50, b"ab\0" * 100])
def test_binary_data_is_rejected(data: bytes) -> None:
    with pytest.raises(BadRecordError) as caught:
        extract(data, "text/html")
    assert caught.value.reason == "binary"


@given(
    st.binary(max_size=300),
    st.sampled_from(["", "utf-8", "shift_jis", "utf-7", "hex", "idna", "\0", "a" * 99]),
)
def test_any_bytes_are_decoded_or_rejected(data: bytes, declared: str) -> None:
    try:
        text = decode(data, declared, is_html=True)
    except BadRecordError as error:
        assert error.reason == "binary"
    else:
        text.encode()  # no surrogates


def test_html_keeps_content_and_drops_boilerplate() -> None:
    html = f"""<html><head><title> The
      title </title><script>var x = 1</script></head><body><nav><a href=/>Home</a> <a href=/b>Imprint</a></nav>
      <div class="sidebar">Related links</div><main><h1>Heading</h1><p>{ARTICLE}</p>
      <table><tr><th>name</th><th>size</th></tr><tr><td>a</td><td>2&nbsp;kB</td></tr></table>
      <pre><code>def f(x):\n    return x  +  1\n</code></pre></main><footer>Cookies</footer></body></html>"""
    page = extract_html(html)
    assert page.title == "The title"
    assert "name\t\tsize\n" in page.text and "def f(x):\n    return x  +  1" in page.text
    assert page.text.startswith(f"Heading\n\n{ARTICLE.strip()}")
    assert not any(word in page.text for word in ("Home", "Related", "Cookies", "var x"))
    everything = extract_html(html, main_content=False).text
    assert all(word in everything for word in ("Home", "Related", "Cookies")) and "var x" not in everything


HTML = st.lists(
    st.text(max_size=20)
    | st.sampled_from(["<div>", "</div>", "<p>", "<table><tr><td>", "<pre>", "<script>", "<!--", "&#xD800;", "\0"])
)  # fmt: skip


@given(HTML, st.booleans())
def test_any_html_gives_text(parts: list[str], main_content: bool) -> None:
    html = "".join(parts).encode("utf-8", "replace").decode()
    text = normalise(extract_html(html, main_content=main_content).text)
    assert "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
    text.encode()


@pytest.mark.parametrize(
    "html",
    [
        "<div>" * 200_000, "<div>" * 2000 + "</div>" * 2000, "<table><tr><td>" * 50_000, "&lt;" * 500_000,
        "x" * 5_000_000,
    ],
)  # fmt: skip
def test_hostile_html_takes_bounded_time(html: str) -> None:
    start = time.process_time()
    extract_html(html)
    assert time.process_time() - start < 10


def pdf(pages: list[list[str]], trailer: str = "") -> bytes:
    """A PDF with lines of text, one list per page, in Helvetica."""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]  # fmt: skip
    kids = []
    for lines in pages:
        text = "".join(f"({line}) Tj 0 -20 Td " for line in lines)
        stream = f"BT /F1 12 Tf 50 780 Td {text}ET"
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        kids.append(f"{len(objects) + 1} 0 R")
        resources = "/Resources << /Font << /F1 3 0 R >> >>"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R {resources} /MediaBox [0 0 595 842] /Contents {len(objects)} 0 R >>"
        )
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n"
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n" + "".join(
        f"{p:010d} 00000 n \n" for p in places
    )
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{start}\n%%EOF\n"
    return out.encode("latin-1")


# RC4 of 40 bits with the user password "x": only the length and form of /O and /U matter, no password opens it.
ENCRYPTED = (
    f"/Encrypt << /Filter /Standard /V 1 /R 2 /O <{'ab' * 32}> /U <{'cd' * 32}> /P -4 >> /ID [<00> <00>]"
)


def test_pdf_drops_running_heads_and_joins_hyphens() -> None:
    names = [letter * 3 for letter in "ABCDEF"]
    pages = [
        ["A Handbook", f"Of {n}", f"{n} has a hyphen-", "ated word", f"end of {n}", f"Page {k}"]
        for k, n in enumerate(names)
    ]
    text = extract(pdf(pages), "text/html").text  # recognised by its first bytes
    assert "Handbook" not in text and "Page" not in text
    assert [n for n in names if f"Of {n}\n{n} has a hyphenated word\nend of {n}" in text] == names


def test_pdf_of_few_pages_keeps_every_line() -> None:
    assert extract(pdf([["Title", "body", "3"]]), "application/pdf").text.split("\n") == [
        "Title", "body", "3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pdf([["secret"]], ENCRYPTED), "encrypted"), (b"%PDF-1.7 and no more", "damaged"),
        (b"%PDF-", "damaged"), (b"", "damaged"),
    ],
)  # fmt: skip
def test_unusable_pdf_is_rejected(data: bytes, reason: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        extract(data, "application/pdf")
    assert caught.value.reason == reason


@pytest.mark.parametrize("package", ["resiliparse.parse.html", "pypdfium2"])
def test_missing_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadRecordError, match=r"pip install 'whorl\[corpus\]'"):
        extract_pdf(b"%PDF-") if package == "pypdfium2" else extract_html("<p>x")


@pytest.mark.parametrize(
    "text", ["Grüße, café, naïve – “quoted” €5…", "Съешь ещё этих булок", "日本語の文章", "emoji 😀 and 𝄞"]
)
def test_mojibake_is_repaired(text: str) -> None:
    broken = "".join(bytes([b]).decode("cp1252", "ignore") or chr(b) for b in text.encode())
    assert repair_mojibake(broken) == text
    assert repair_mojibake(f"{broken}\nein heiles „ü“") == f"{text}\nein heiles „ü“"


@given(st.text())
def test_mojibake_of_any_two_characters_is_repaired(text: str) -> None:
    text = "éß" + text.encode("utf-8", "ignore").decode().replace("\n", "").replace("\r", "")
    broken = "".join(bytes([b]).decode("cp1252", "ignore") or chr(b) for b in text.encode())
    repaired = repair_mojibake(broken)
    assert repaired in (text, broken)
    if not any("\x80" <= c <= "\x9f" for c in text):
        assert repaired == text


@pytest.mark.parametrize(
    "text", ["“AMANHÃ”", "naïve café, Ångström, €20", "Ã", "ação\nirmã…", "Â© 2026", "año – niño"]
)
def test_text_without_mojibake_stays(text: str) -> None:
    assert repair_mojibake(text) == text


def test_normalise_steps() -> None:
    assert normalise("a\r\nb\rc\x0cd\u2028e") == "a\nb\nc\nd\ne"
    assert normalise("\ufeffa\0b\x1b[1mc\x9dd\te") == "ab[1mcd\te"
    assert normalise("e\u0301") == "é"
    assert normalise("e\u0301\r\n", ["line_ends"]) == "e\u0301\n"
    assert normalise("a\r\n\0", []) == "a\r\n\0"


@given(st.text())
def test_normalise_is_idempotent_and_in_form_c(text: str) -> None:
    once = normalise(text, [name for name in STEPS if name != "mojibake"])
    assert normalise(once, [name for name in STEPS if name != "mojibake"]) == once
    assert unicodedata.is_normalized("NFC", once) and "\r" not in once


def test_many_marks_take_linear_time() -> None:
    start = time.process_time()
    assert len(normalise("a" + "\u0301\u0323" * 500_000)) < 100
    assert time.process_time() - start < 5
