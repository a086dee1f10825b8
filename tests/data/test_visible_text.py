"""All visible text of a page is kept: each element of HTML, characters of each length, each encoding of the web."""

from __future__ import annotations

import pytest
from webencodings.labels import LABELS

from whorl.data.extraction import decode, extract_html
from whorl.data.quarantine import BadRecordError

PARAGRAPH = "<p>A paragraph of the page that is long enough to be content, with words and more words.</p>"
SHELLS = [
    "{}", "<article>{}</article>", "<div><main><article>{}</article></main></div>",
    "<div><div><div>{}</div></div></div>",
]  # fmt: skip
SHOWN = [
    "a", "abbr", "acronym", "address", "article", "b", "bdi", "bdo", "big", "blockquote", "center", "cite", "code",
    "data", "dd", "del", "details", "dfn", "dir", "div", "dl", "dt", "em", "fieldset", "figcaption", "figure", "font",
    "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hgroup", "i", "ins", "kbd", "label", "legend", "li",
    "main", "map", "mark", "marquee", "menu", "meter", "nobr", "ol", "output", "p", "pre", "progress", "q", "rp",
    "rt", "ruby", "s", "samp", "search", "section", "slot", "small", "span", "strike", "strong", "sub", "summary",
    "sup", "svg", "table", "time", "tr", "tt", "u", "ul", "var", "xmp", "math", "caption", "td", "th",
]  # fmt: skip
BOILERPLATE = ["aside", "button", "footer", "nav"]  # shown, but not part of the main content
NOT_SHOWN = [
    "audio", "canvas", "datalist", "dialog", "iframe", "noscript", "object", "option", "script", "select", "style",
    "template", "textarea", "title", "video",
]  # fmt: skip
AROUND = {
    "caption": "<table>{}<tr><td>x</table>", "td": "<table><tr>{}</table>", "th": "<table><tr>{}</table>",
    "tr": "<table>{}</table>", "option": "<select>{}</select>",
}  # fmt: skip
INSIDE = {"svg": "<text>{}</text>", "math": "<mtext>{}</mtext>", "tr": "<td>{}</td>", "ul": "<li>{}</li>"}


def element(name: str, text: str) -> str:
    inner = INSIDE.get(name, "{}").format(text)
    return AROUND.get(name, "{}").format(f"<{name}>{inner}</{name}>")


def words_of(page: str, main_content: bool) -> list[str]:
    return extract_html(f"<body>{page}</body>", main_content=main_content).text.split()


@pytest.mark.parametrize("main_content", [True, False])
@pytest.mark.parametrize("shell", SHELLS)
def test_each_element_gives_what_a_browser_shows(shell: str, main_content: bool) -> None:
    for names, is_shown in ((SHOWN, True), (BOILERPLATE[:2], not main_content), (NOT_SHOWN, False)):
        for name in names:
            page = shell.format(PARAGRAPH + element(name, " Keyword ") + PARAGRAPH)
            assert ("Keyword" in words_of(page, main_content)) == is_shown, name
    for name in BOILERPLATE[2:]:
        assert "Keyword" in words_of(shell.format(element(name, "Keyword")), main_content=False)


@pytest.mark.parametrize("main_content", [True, False])
@pytest.mark.parametrize("name", ["figure", "details", "section"])
def test_nested_elements_keep_their_text(name: str, main_content: bool) -> None:
    blocks = [
        "<table><tr><td>cell</td></tr></table>", "<pre><code>code</code></pre>", "<blockquote>quote</blockquote>",
        "<ul><li>item</li></ul>", "<figure><figcaption>caption</figcaption></figure>",
    ]  # fmt: skip
    inside = "".join(blocks)
    found = words_of(f"{PARAGRAPH}<{name}>{inside}<{name}>deeper</{name}></{name}>", main_content)
    assert {"cell", "code", "quote", "item", "caption", "deeper"} <= set(found)


@pytest.mark.parametrize("main_content", [True, False])
@pytest.mark.parametrize("character", ["x", "é", "я", "我", "あ", "한", "ก", "“", "€", "😀", "𠮷"])
def test_a_character_alone_in_an_element_is_kept(character: str, main_content: bool) -> None:
    for one in (character, f"&#{ord(character)};", f"&#x{ord(character):x};", f" {character} "):
        page = extract_html(
            f"{one}<a>{one}</a>ab<b>{one}</b>.<title>{one}</title>", main_content=main_content
        )
        assert page.text.count(character) == 3 and "\uffff" not in page.text
    assert extract_html("我<a>在</a>北京<b>住</b>。", main_content=main_content).text == "我在北京住。"
    assert extract_html("<title>我</title>a<b>&nbsp;</b>b").title == "我"


def test_list_of_links_near_the_root_is_navigation() -> None:
    links = "<ul>" + "<li><a href=/x>Elsewhere</a></li>" * 5 + "</ul>"
    assert words_of(PARAGRAPH + links, main_content=True).count("Elsewhere") == 0
    assert words_of(PARAGRAPH + links, main_content=False).count("Elsewhere") == 5


CYRILLIC, LATIN = "Съешь ещё булок", "Größe"
# Encoding of the standard -> Python's codec, and a text in it
SAMPLES = {
    "utf-8": ("utf-8", "我é😀"), "ibm866": ("cp866", CYRILLIC), "iso-8859-2": ("iso8859-2", "Příliš žluťoučký"),
    "iso-8859-3": ("iso8859-3", "ĉiuĵaŭde"), "iso-8859-4": ("iso8859-4", "āčēģ"), "iso-8859-5": ("iso8859-5", CYRILLIC),
    "iso-8859-6": ("iso8859-6", "اللغة العربية"), "iso-8859-7": ("iso8859-7", "Ελληνικά"),
    "iso-8859-8": ("iso8859-8", "עברית"), "iso-8859-8-i": ("iso8859-8", "עברית"), "iso-8859-10": ("iso8859-10", "ðŋþ"),
    "iso-8859-13": ("iso8859-13", "ąžuolas"), "iso-8859-14": ("iso8859-14", "ŵŷ"), "iso-8859-15": ("iso8859-15", "cœur €"),
    "iso-8859-16": ("iso8859-16", "Școală"), "koi8-r": ("koi8-r", CYRILLIC), "koi8-u": ("koi8-u", "їжак"),
    "macintosh": ("mac-roman", LATIN), "windows-874": ("cp874", "ภาษาไทย… “ไทย”"), "windows-1250": ("cp1250", "Příliš"),
    "windows-1251": ("cp1251", CYRILLIC), "windows-1252": ("cp1252", "it’s €5"), "windows-1253": ("cp1253", "Ελληνικά"),
    "windows-1254": ("cp1254", "ışık ’"), "windows-1255": ("cp1255", "עברית"), "windows-1256": ("cp1256", "اللغة"),
    "windows-1257": ("cp1257", "ąžuolas"), "windows-1258": ("cp1258", "Đường"[:2]),
    "x-mac-cyrillic": ("mac-cyrillic", CYRILLIC),
    "gbk": ("gbk", "联通"), "gb18030": ("gb18030", "联通𠮷"), "big5": ("big5hkscs", "繁體中文"),
    "euc-jp": ("euc_jp", "日本語ｶﾅ"),
    "iso-2022-jp": ("iso2022_jp", "日本語"), "shift_jis": ("cp932", "日本語①～"), "euc-kr": ("cp949", "한국어똠"),
    "utf-16be": ("utf-16-be", "<p>我</p>"), "utf-16le": ("utf-16-le", "<p>我</p>"), "x-user-defined": ("cp1252", "é"),
}  # fmt: skip


@pytest.mark.parametrize("encoding", sorted(set(LABELS.values())))
def test_each_label_of_the_web_is_decoded(encoding: str) -> None:
    assert len(LABELS) == 228
    if encoding == "replacement":  # refused by browsers; two of its encodings are read here
        for label, codec in (("hz-gb-2312", "hz"), ("iso-2022-kr", "iso2022_kr")):
            assert decode("한국".encode(codec) if "kr" in codec else "联通".encode(codec), label)[0] in "한联"
        return
    codec, text = SAMPLES[encoding]
    data = text.encode(codec)
    for label in (label for label, name in LABELS.items() if name == encoding):
        assert decode(data, label) == decode(data, label.upper()) == text, label
        if not encoding.startswith("utf-16"):
            page = f'<meta charset="{label}">'.encode() + data
            assert decode(page, is_html=True).endswith(text), label


def test_a_detected_encoding_must_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.data.extraction.charset._detect", lambda data: "euc_jp")
    data = "Съешь ещё этих мягких булок".encode("cp1251") + b"\xff"
    assert decode(data, "windows-1251").startswith("Съешь")
    with pytest.raises(UnicodeDecodeError):
        data.decode("euc_jp")
    text = decode(data)  # nothing is declared, and the answer is none
    assert text == data.decode("cp1252", "replace")


def test_one_bad_byte_keeps_the_declared_encoding() -> None:
    for label, codec, text in (
        ("x-sjis", "cp932", "日本語の文章です"),
        ("big5", "big5hkscs", "繁體中文的文章"),
    ):
        data = (text * 20).encode(codec) + b"\xff\xff" + text.encode(codec)
        assert decode(data, label).startswith(text * 20)


def test_binary_data_in_any_encoding_is_rejected() -> None:
    for label in ("windows-874", "gb18030", "utf-16le"):
        with pytest.raises(BadRecordError):
            decode(bytes(range(256)) * 8, label)
