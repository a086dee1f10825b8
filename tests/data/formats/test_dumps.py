"""Dumps of Wikipedia and Stack Exchange, and Gutenberg texts: documents with provenance; hostile and cut files."""

from __future__ import annotations

import bz2
import tempfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from whorl.data.formats import FORMATS, Record, dump
from whorl.data.quarantine import BadRecordError

SITE = (
    "<siteinfo><base>https://de.wikipedia.org/wiki/Hauptseite</base><namespaces>"
    '<namespace key="0" /><namespace key="6">Datei</namespace></namespaces></siteinfo>'
)
TIME = "2026-11-24T00:00:00Z"
ENTITIES = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]>'
    "<mediawiki><page><title>&b;</title></page></mediawiki>"
)


def article(title: str, text: str, *, ns: int = 0, more: str = "", model: str = "wikitext") -> str:
    return (
        f"<page><title>{escape(title)}</title><ns>{ns}</ns><id>1</id>{more}<revision><id>2</id>"
        f"<timestamp>{TIME}</timestamp><contributor><username>u</username></contributor>"
        f'<model>{model}</model><text bytes="3">{escape(text)}</text></revision></page>'
    )


def wiki(*pages: str) -> bytes:
    return (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/">' + SITE + "\n".join(pages) + "</mediawiki>"
    ).encode()


def post(id: int, kind: int, body: str, **attributes: object) -> str:
    fields = {
        "Id": id, "PostTypeId": kind, "Score": 0, "Body": body, "ContentLicense": "CC BY-SA 4.0",
        **attributes,
    }  # fmt: skip
    return "<row " + " ".join(f"{name}={quoteattr(str(value))}" for name, value in fields.items()) + " />"


def posts(*rows: str) -> bytes:
    return (
        '\ufeff<?xml version="1.0" encoding="utf-8"?>\n<posts>\n' + "\n".join(rows) + "\n</posts>"
    ).encode()


def read(format: str, data: bytes, name: str = "a.xml", **options: Any) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        return list(FORMATS.get(format)(**options).records(str(path)))


def outcomes(records: list[Record]) -> list[str]:
    """The texts, or the reasons of rejections."""
    return [r.value.reason if isinstance(r.value, BadRecordError) else r.value["text"] for r in records]


@pytest.mark.parametrize("name", ["a.xml", "a.xml.bz2"])
def test_article_has_text_and_provenance(name: str) -> None:
    page = article("Ada & Größe", "'''Ada''' [[Datei:x.jpg|y]]war")
    data = wiki(page)
    (record,) = read("wikipedia", bz2.compress(data) if name.endswith("bz2") else data, name)
    assert record.value == {
        "text": "Ada war", "url": "https://de.wikipedia.org/wiki/Ada_%26_Gr%C3%B6%C3%9Fe", "title": "Ada & Größe",
        "time": TIME, "media_type": "text/x-wiki",
    }  # fmt: skip
    assert data[record.offset : record.end].decode() == page and record.length == len(page.encode())


def test_redirects_are_rejected_and_other_namespaces_skipped() -> None:
    found = read("wikipedia", wiki(
        article("A", "one"), article("Talk:A", "talk", ns=1), article("B", "#REDIRECT", more='<redirect title="A" />'),
        article("C", "{}", model="json"), article("D", "long " * 400), article("E", ""), article("F", "two"),
    ), longest=1500)  # fmt: skip
    assert outcomes(found) == ["one", "redirect", "media_type", "too_large", "", "two"]
    assert [r.number for r in found] == [1, 2, 3, 4, 5, 6]


def test_last_revision_counts() -> None:
    page = article("A", "old").replace("</page>", "") + article("A", "new").partition("</id>")[2]
    assert outcomes(read("wikipedia", wiki(page))) == ["new"]


HOSTILE = {
    "entities": ENTITIES, "external entity": '<!DOCTYPE x SYSTEM "file:///etc/passwd"><mediawiki/>',
    "depth": "<a>" * 1000, "a tag without end": "<mediawiki><page " + "x" * 3_000_000,
    "an attribute without end": '<mediawiki><row Id="' + "x" * 3_000_000, "no XML": "plain text", "empty": "",
    "undeclared entity": "<mediawiki>&bomb;</mediawiki>", "NUL": "<mediawiki>\0</mediawiki>",
}  # fmt: skip


@pytest.mark.parametrize("format", ["wikipedia", "stackexchange"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_xml_is_damaged(kind: str, format: str) -> None:
    assert outcomes(read(format, HOSTILE[kind].encode(), longest=100_000)) == ["damaged"]


def test_elements_hold_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    many = "".join(f"<x{n}>{n}</x{n}>" for n in range(3000))
    found = read("wikipedia", wiki(f"<page><ns>0</ns>{many}</page>", article("A", "one")), longest=100_000)
    assert outcomes(found) == ["too_large", "one"]
    monkeypatch.setattr(dump, "PIECE", 7)
    assert outcomes(read("wikipedia", wiki(article("A", "a&b<c")))) == ["a&b<c"]


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
def test_truncated_dump_keeps_complete_pages(cut: float) -> None:
    data = wiki(*(article(f"P{n}", f"page {n}") for n in range(50)))
    data = data[: int(len(data) * cut)]
    *found, last = outcomes(read("wikipedia", data))
    assert found == [f"page {n}" for n in range(data.count(b"</page>"))] and last == "damaged"
    packed = bz2.compress(wiki(*(article(f"P{n}", f"page {n}") for n in range(50))))
    assert outcomes(read("wikipedia", packed[:-20], "a.xml.bz2"))[-1] == "damaged"


def test_question_has_its_answers_by_score() -> None:
    data = posts(
        post(4, 1, "<p>How <b>so</b>?</p>", Title="A & B", CreationDate=TIME, Score=9),
        post(5, 2, "<p>third</p>", ParentId=4, Score=-1),
        post(6, 1, "<p>Other</p>", Title="T", ContentLicense="CC BY-SA 2.5"),
        post(7, 2, "<p>first</p><pre><code>x = 1\n  y</code></pre>", ParentId=4, Score=7, ContentLicense="CC BY-SA 3.0"),
        post(8, 4, "<p>about a tag</p>"), post(9, 2, "<p>second</p>", ParentId=4, Score=3),
    )  # fmt: skip
    one, two = read("stackexchange", data)
    assert one.value == {
        "text": "A & B\n\nHow so?\n\nfirst\n\nx = 1\n  y\n\nsecond\n\nthird", "url": "/questions/4", "title": "A & B",
        "time": TIME, "licence": "CC-BY-SA-3.0 AND CC-BY-SA-4.0", "media_type": "text/html",
    }  # fmt: skip
    assert outcomes([two]) == ["T\n\nOther"] and two.value["licence"] == "CC-BY-SA-2.5"  # type: ignore[index]
    assert data[one.offset : one.end].startswith(b'<row Id="4"') and data[one.offset : one.end].endswith(
        b"/>"
    )
    assert one.length == one.end - one.offset


def test_posts_without_question_or_number_are_rejected() -> None:
    data = posts(
        post(3, 2, "x", ParentId=99), "<row />", '<row Id="a" PostTypeId="1" />', post(4, 2, "x"),
        post(5, 1, "w " * 900), post(6, 1, "<p>long</p>"), post(7, 2, "w " * 1001, ParentId=6),
    )  # fmt: skip
    found = outcomes(read("stackexchange", data, longest=2000))
    assert sorted(found) == ["bad_field"] * 3 + ["no_question", "too_large"] + ["w " * 899 + "w"]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-3, 3)), max_size=12), st.randoms())
def test_threads_do_not_depend_on_order_of_rows(answers: list[tuple[int, int]], random: Any) -> None:
    rows = [post(n, 1, f"q{n}") for n in range(1, 5)]
    rows += [post(10 + i, 2, f"a{score}", ParentId=q, Score=score) for i, (q, score) in enumerate(answers)]
    random.shuffle(rows)
    expected = [
        "\n\n".join(
            [f"q{n}", *(f"a{s}" for _, s in sorted((a for a in answers if a[0] == n), key=lambda a: -a[1]))]
        )
        for n in range(1, 5)
    ]
    assert outcomes(read("stackexchange", posts(*rows))) == expected


@given(st.binary(max_size=200), st.integers(0, 400))
@example(b'<?xml version="1.0" encoding="autf-8"?>', 0)
def test_any_bytes_inside_a_dump_end_with_records(noise: bytes, at: int) -> None:
    for format, data in (
        ("wikipedia", wiki(article("A", "one"))),
        ("stackexchange", posts(post(1, 1, "one"))),
    ):
        assert len(read(format, data[:at] + noise + data[at:])) <= 3


BOOK = """The Project Gutenberg eBook of A Long
Title

This ebook is for the use of anyone anywhere.

Title: A Long
       Title

Author: Some One

Release date: June 1, 1998 [eBook #1342]
                Most recently updated: October 29, 2024

Language: English

*** START OF THE PROJECT GUTENBERG EBOOK A LONG TITLE ***

Chapter 1

It was the end of the beginning. * * *

*** END OF THE PROJECT GUTENBERG EBOOK A LONG TITLE ***

Updated editions will replace the previous one.
"""
OLD = """Title: Old
[Etext #7]
*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*

The text: caf\u00e9.

End of the Project Gutenberg Etext of Old
"""


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_book_loses_header_and_footer(mark: str) -> None:
    (record,) = read("gutenberg", (mark + BOOK).replace("\n", "\r\n").encode(), "a.txt")
    assert record.value == {
        "text": "Chapter 1\n\nIt was the end of the beginning. * * *", "title": "A Long Title",
        "url": "https://www.gutenberg.org/ebooks/1342", "time": "June 1, 1998", "media_type": "text/plain",
    }  # fmt: skip


def test_old_books_and_other_texts() -> None:
    declared = ("Character set encoding: ISO-8859-1\n" + OLD).encode("latin-1")
    (record,) = read("gutenberg", declared, "a.txt")
    assert outcomes([record]) == ["The text: café."]
    cut = BOOK[: BOOK.index("*** END")]
    assert outcomes(read("gutenberg", cut.encode(), "a.txt"))[0].endswith("* * *")
    assert outcomes(read("gutenberg", b"any text", "a.txt")) == ["no_header"]
    assert outcomes(read("gutenberg", bytes(1000), "a.txt")) == ["binary"]
    assert outcomes(read("gutenberg", BOOK.encode(), "a.txt", longest=100)) == ["too_large"]
