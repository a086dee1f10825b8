"""Texts of Project Gutenberg: the book between the marks of the header and of the footer, with its licence.

    {"text": "...", "url": "https://www.gutenberg.org/ebooks/1342", "title": "...", "time": "June 1, 1998"}

Title, number and release date are those of the header. The encoding is the declared one if the text is not UTF-8. A file
without a mark of the header is rejected; without that of the footer, the text goes to the end of the file.
"""

from __future__ import annotations

import re
from typing import Any

from whorl.data.extraction import decode
from whorl.data.formats.web import HTML
from whorl.data.quarantine import BadRecordError

# The second form is that of files before 2003.
START = re.compile(
    r"^(?:\*{3} ?START OF TH(?:E|IS) PROJECT GUTENBERG[^*]{0,500}\*{3}|\*END\*? ?THE SMALL PRINT.{0,200}$)[^\S\n]*\n?",
    re.MULTILINE | re.IGNORECASE,
)
FOOTER = re.compile(
    r"^(?:\*{3} ?END OF TH(?:E|IS) PROJECT GUTENBERG|End of (?:the |this )?Project Gutenberg(?:'s)? )",
    re.MULTILINE | re.IGNORECASE,
)
TITLE = re.compile(r"^Title: *(.{1,500}(?:\n[ \t]{1,20}\S.{0,500}){0,10})", re.MULTILINE)
RELEASE = re.compile(r"^(?:Release|Posting) Date: *([^\[\n]{1,100})", re.MULTILINE | re.IGNORECASE)
NUMBER = re.compile(r"\[E(?:Book|text) #(\d{1,9})\]", re.IGNORECASE)
CHARSET = re.compile(rb"^Character set encoding: *([A-Za-z0-9_:.-]{2,40})", re.MULTILINE | re.IGNORECASE)
HEADER_BYTES = 32_000


class Gutenberg(HTML):
    """See the top of this file."""

    media_type = "text/plain"

    def _value(self, data: bytes) -> dict[str, Any]:
        declared = CHARSET.search(data[:HEADER_BYTES])
        text = decode(data, declared[1].decode() if declared else "")
        text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        start = START.search(text, 0, HEADER_BYTES)
        if start is None:
            raise BadRecordError("no_header", "", "no mark of the start of a Project Gutenberg text")
        header = text[: start.start()]
        footer = FOOTER.search(text, start.end())
        title, release, number = (pattern.search(header) for pattern in (TITLE, RELEASE, NUMBER))
        return {
            self.text_field: text[start.end() : footer.start() if footer else None].strip("\n"),
            "url": f"https://www.gutenberg.org/ebooks/{number[1]}" if number else None,
            "title": " ".join(title[1].split()) if title else None,
            "time": release[1].strip() if release else None,
            "media_type": self.media_type,
        }
