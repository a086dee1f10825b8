"""Wikitext: what is shown stays, markup goes; any string is accepted, in linear time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.data.extraction.wikitext import plain_text

CASES = {
    "": "",
    "'''Bold''' and ''italic'' and '''''both''''' isn't": "Bold and italic and both isn't",
    "a [[city]], [[city|a town]], [[city]]s, [[Mercury (planet)|]], [[:C:X]]": "a city, a town, citys, Mercury, C:X",
    "before [[File:a.jpg|thumb|A [[b|c]] caption]] after": "before  after",
    "x [[Category:Towns]]": "x",
    "[https://example.org a site] [https://example.org] [1] [mailto:a@b.c mail]": "a site  [1] mail",
    "one<ref name=a>{{cite|x}}</ref> two<ref name=a /> three<references />": "one two three",
    "'''Paris''' ({{IPA|x}}; {{y}}) is f() here": "Paris is f() here",
    "{{Infobox|a={{b|{{{c|d}}}}}|e=[[f]]}}text": "text",
    "{{lang|fr|mot}} {{nowrap|1=5 km}} {{LANG|de|[[Wort|Worte]]}}": "mot 5 km Worte",
    "== History ==\ntext\n=== Older===\nx": "History\ntext\nOlder\nx",
    "x == y\n= a": "x == y\n= a",
    "* one\n** two\n# three\n: four\n; five\n----\nsix": "one\ntwo\nthree\nfour\nfive\n\nsix",
    "<nowiki>[[raw]] ''x''</nowiki> &amp; &lt;b&gt;": "[[raw]] ''x'' & <b>",
    "<syntaxhighlight lang=c>\nint a[[1]]; // ''x'' &lt;\n</syntaxhighlight>": "int a[[1]]; // ''x'' &lt;",
    "one<br>two<br />three <b>four</b> a<b and c>d <unknown>": "one\ntwo\nthree four a<b and c>d <unknown>",
    "a<!-- b -->c <!-- d": "ac  d",
    "__NOTOC__x __init__ y": "x __init__ y",
    "an {{open brace and [[a link\nand {| a table": "an open brace and a link\nand {| a table",
    "closed }} and ]] and\n|} x": "closed  and  and\n x",
    "{|\n! A !! B\n|-\n| style='x' | 1 || [[x|2]]\n|-\n|\n* item\n|}\nafter": "A\tB\n1\t2\nitem\n\nafter",
    "{|\n|+ Name\n|-\n| a\n{|\n| b || c\n|}\n| d\n|}": "Name\na b\tc\td",
    "a\0b\x01\x02\x03c": "abc",
}  # fmt: skip


@pytest.mark.parametrize("wikitext", CASES)
def test_wikitext_gives_text(wikitext: str) -> None:
    assert plain_text(wikitext) == CASES[wikitext]


def test_names_of_namespaces_are_those_of_the_wiki() -> None:
    assert plain_text("a[[Datei:b.jpg|c]][[File:d|e]]", dropped={"datei"}) == "ae"


MARKUP = [
    "{{", "}}", "{{{", "}}}", "[[", "]]", "{|\n", "\n{|", "|}", "|", "||", "!", "!!", "|-\n", "<ref>", "</ref>",
    "<ref name=a/>",
    "<nowiki>", "</nowiki>", "<!--", "-->", "''", "'''", "==", "\n", "* ", "[https://a.b ", "]", "<br>", "<pre>",
    "</pre>", "&amp;",
    "lang|fr|", "File:", "=", "__TOC__", "\x01", "\x020", "\ud800", " ",
]  # fmt: skip


@given(st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=5))))
def test_any_string_is_accepted(pieces: list[str]) -> None:
    text = plain_text("".join(pieces))
    assert not re.search("[\0-\x08\x0b\x0c]", text)


WORD = st.text("abcdefgäßя漢", min_size=1, max_size=6)
SHOWN = ["{}", "'''{}'''", "''{}''", "[[{}]]", "[[Target|{}]]", "[https://example.org {}]", "<b>{}</b>",
         "{{{{lang|fr|{}}}}}",
         "<nowiki>{}</nowiki>", "\n* {}\n", "\n== {} ==\n", "<span class='x'>{}</span>", "\n{{|\n| {} || {}\n|}}\n",
         "{{{{Template|x={{{{y}}}}}}}} {}", "<ref>z</ref> {}", "{}<!-- z -->"]  # fmt: skip


@given(st.lists(st.tuples(WORD, st.sampled_from(SHOWN)), max_size=20))
def test_plain_words_stay_in_order(parts: list[tuple[str, str]]) -> None:
    wikitext = " ".join(form.format(*[word] * 2) for word, form in parts)
    expected = [w for word, form in parts for w in ([word] * 2 if "||" in form else [word])]
    assert plain_text(wikitext).split() == expected


@given(
    st.lists(
        st.one_of(WORD, st.sampled_from(["{{", "[[", "{|", "<ref>", "<nowiki>", "<!--", "'''", "* ", "=="])),
        max_size=30,
    )
)
def test_open_markup_loses_no_word(pieces: list[str]) -> None:
    words = [piece for piece in pieces if piece.isalpha()]
    assert (
        re.findall(r"[^\W\d_]+", plain_text(" ".join(pieces)).replace("ref", "").replace("nowiki", ""))
        == words
    )


@pytest.mark.parametrize(
    "unit",
    [
        "<nowiki>", "<ref>", "{{", "}}", "[[a|", "{{lang|fr|", "{|\n", "<!--", "[https://", "( ", "\n=",
        "<b =", "'", "=", "{{a}}(",
    ],
)  # fmt: skip
def test_time_is_linear(unit: str) -> None:
    def seconds(n: int) -> float:
        begin = time.process_time()
        plain_text(unit * n)
        return time.process_time() - begin

    # Eight times the length: 64 times the time if it were quadratic.
    assert seconds(80_000) < 24 * max(min(seconds(10_000) for _ in range(3)), 0.004)
