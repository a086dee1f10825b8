"""HTML as text, by resiliparse (Bevendorff et al. 2018): the main content, without boilerplate.

Headings, paragraphs and list items are separate lines. Cells of a table are separated by tabs, and preformatted text
keeps its white space. Text that browsers hide is left out: alternative texts, scripts, templates, the fallback of a
medium (`object`, `video`, ...), hidden elements, values of form controls.

The search for the main content takes quadratic time in the depth of the tree: 9 s at 20,000 nested elements. All text of
pages deeper than `MAX_DEPTH` is returned instead, in linear time. The search of resiliparse 2.0.1 would lose three kinds
of content, which are rewritten before it: text nodes of one character of three bytes (taken for an icon), `time`, and
lists less than four elements below `body`.
"""

from __future__ import annotations

import re
from html import unescape
from itertools import accumulate
from typing import Any

from whorl.data.extraction.page import Page, corpus_extra

MAX_DEPTH = 1000
PIECE = 1 << 13  # characters, in which tags are counted
# Start and end tags, without elements that have no end tag or may lack it.
NO_END = "area|base|br|col|dd|dt|embed|hr|img|input|li|link|meta|option|p|source|td|th|tr|track|wbr"
TAG = re.compile(rf"<(/?)(?!(?:{NO_END})\b)[a-z]", re.IGNORECASE)
NOT_SHOWN = (
    "img", "area", "embed", "object", "video", "audio", "canvas", "datalist", "select", "input", "textarea",
    "title", "svg desc", "svg metadata", "svg defs", "dialog:not([open])", "[hidden]",
)  # fmt: skip
SHOWN_AS_SPAN = re.compile(r"<(/?)(?:time|button)(?=[\s/>])", re.IGNORECASE)
TIME = re.compile(r"<(/?)time(?=[\s/>])", re.IGNORECASE)
ONE_CHARACTER = re.compile(r">\s*([\u0800-\ud7ff\uf900-\ufffd]|&#?\w{1,31};?)(?=\s*(?:<|$))")
MARK = "\uffff"  # is no character; makes a text node longer
SHALLOW_LISTS = "body > ul, body > * > ul, body > * > * > ul"
MAX_LINK_SHARE = 0.2  # of a list's text; resiliparse drops deeper lists with more


def extract_html(html: str, *, main_content: bool = True) -> Page:
    """Return the text and the title of an HTML page.

    Args:
        main_content: leave out navigation, side bars, headers, footers and buttons; else all visible text is returned.

    Raises:
        BadRecordError: "not_installed", the extra `corpus` is missing.
    """
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.html import HTMLTree
    except ImportError as error:
        raise corpus_extra("resiliparse") from error
    main_content = main_content and not _is_deep(html)
    if main_content:
        html = TIME.sub(r"<\1span", html) if "<time" in html or "<TIME" in html else html
        html = ONE_CHARACTER.sub(_mark, f">{html}")[1:]
    else:
        html = SHOWN_AS_SPAN.sub(r"<\1span", html)
    tree: Any = HTMLTree.parse(html)
    if main_content and tree.body is not None:
        _move_lists_down(tree)
    text: str = extract_plain_text(
        tree, main_content=main_content, alt_texts=True, form_fields=True,
        skip_elements=[*NOT_SHOWN, "button"] if main_content else NOT_SHOWN,
    )  # fmt: skip
    title = (tree.title or "").replace(MARK, "")
    return Page(text.replace(MARK, ""), " ".join(title.split()) or None)


def _mark(match: re.Match[str]) -> str:
    character = unescape(match[1])
    is_one = len(character) == 1 and "\u0800" <= character <= "\ufffd" and not character.isspace()
    return match[0] + MARK if is_one else match[0]


def _move_lists_down(tree: Any) -> None:
    """Put lists near the root into more elements, unless they are mostly links."""
    for node in tree.body.query_selector_all(SHALLOW_LISTS):
        limit = MAX_LINK_SHARE * len(node.text)
        linked = accumulate(len(link.text) for link in node.get_elements_by_tag_name("a"))
        if any(n > limit for n in linked):
            continue
        outer = inner = tree.create_element("div")
        for _ in range(2):
            inner = inner.append_child(tree.create_element("div"))
        node.replace_with(outer)
        inner.append_child(node)


def _is_deep(html: str) -> bool:
    """Return whether elements may be nested deeper than MAX_DEPTH."""
    depth = 0  # an upper bound, with elements without an end tag: it spares most pages the exact count
    for start in range(0, len(html), PIECE):
        n_ends = html.count("</", start, start + PIECE)
        n_starts = html.count("<", start, start + PIECE) - n_ends
        if depth + n_starts > MAX_DEPTH:
            return max(accumulate(-1 if end else 1 for end in TAG.findall(html)), default=0) > MAX_DEPTH
        depth = max(depth + n_starts - n_ends, 0)
    return False
