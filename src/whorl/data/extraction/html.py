"""HTML as text, by resiliparse (Bevendorff et al. 2018): the main content, without boilerplate.

Headings, paragraphs and list items are lines of their own. Cells of a table are separated by tabs, and preformatted text
keeps its white space.
"""

from __future__ import annotations

from typing import Any

from whorl.data.extraction.page import Page, corpus_extra


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
    text: str = extract_plain_text(tree, main_content=main_content, alt_texts=False)
    return Page(text, " ".join(tree.title.split()) or None)
