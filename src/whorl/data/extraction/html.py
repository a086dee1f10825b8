"""HTML as text, by resiliparse (Bevendorff et al. 2018): the main content, without boilerplate.

Headings, paragraphs and list items are separate lines. Cells of a table are separated by tabs, and preformatted text
keeps its white space.

The search for the main content takes quadratic time in the depth of the tree: 9 s at 20,000 nested elements. All text of
pages deeper than `MAX_DEPTH` is returned instead, in linear time.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

from whorl.data.extraction.page import Page, corpus_extra

MAX_DEPTH = 1000
# Start and end tags, without elements that have no end tag or may lack it.
NO_END = "area|base|br|col|dd|dt|embed|hr|img|input|li|link|meta|option|p|source|td|th|tr|track|wbr"
TAG = re.compile(rf"<(/?)(?!(?:{NO_END})\b)[a-z]", re.IGNORECASE)


def extract_html(html: str, *, main_content: bool = True) -> Page:
    """Return the text and the title of an HTML page.

    Args:
        main_content: leave out navigation, side bars, headers, footers and forms; else all visible text is returned.

    Raises:
        ConfigError: the extra `corpus` is not installed.
    """
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.html import HTMLTree
    except ImportError as error:
        raise corpus_extra("resiliparse") from error
    tree: Any = HTMLTree.parse(html)
    text: str = extract_plain_text(tree, main_content=main_content and not _is_deep(html), alt_texts=False)
    return Page(text, " ".join((tree.title or "").split()) or None)


def _is_deep(html: str) -> bool:
    """Return whether elements may be nested deeper than MAX_DEPTH."""
    if html.count("<") <= MAX_DEPTH:
        return False
    return max(accumulate(-1 if end else 1 for end in TAG.findall(html)), default=0) > MAX_DEPTH
