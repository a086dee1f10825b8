"""MediaWiki XML dumps (`pages-articles`): one record per article, as plain text (`data/extraction/wikitext.py`).

    {"text": "...", "url": "https://en.wikipedia.org/wiki/Ada_Lovelace", "title": "Ada Lovelace", "time": "2026-..."}

Only pages of namespace 0 are articles; other pages give no record. Redirects, and pages of another content model, are
rejected with their reason. Of several revisions the last one counts. The licence is not in the file: it is that of the
source (`ingest.licences`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from whorl.data.extraction.wikitext import FILE_AND_CATEGORY, plain_text
from whorl.data.files import open_decompressed
from whorl.data.formats.dump import Element, elements
from whorl.data.formats.format import Format, Record
from whorl.data.quarantine import BadRecordError

FILE, CATEGORY = "6", "14"  # numbers of the namespaces in every wiki
SAFE = "/:@!$*(),;'~-._"  # characters that MediaWiki leaves in an address
MAX_NAMES = 100  # of namespaces


class Wikipedia(Format):
    """See the top of this file."""

    extracts = True

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        if start:
            return
        base, dropped, number = "", set(FILE_AND_CATEGORY), 0
        with open_decompressed(uri) as stream:
            for element in elements(stream, ("base", "namespace", "page"), self.longest):
                if element.name == "base":
                    base = element.text.strip().rpartition("/")[0]
                elif element.name == "namespace":
                    if element.attributes.get("key") in (FILE, CATEGORY) and len(dropped) < MAX_NAMES:
                        dropped.add(element.text.strip().lower())
                elif element.is_too_large or element.texts.get("ns", "0").strip() == "0":
                    number += 1
                    size = element.end - element.offset
                    value = self._value(element, base, dropped)
                    yield Record(number, element.offset, size, value, element.end)

    def _value(self, page: Element, base: str, dropped: set[str]) -> dict[str, Any] | BadRecordError:
        texts = page.texts
        if page.is_too_large:
            return BadRecordError("too_large", "", f"a page of over {self.longest} characters")
        title = texts.get("title", "")
        if (target := texts.get("redirect/title")) is not None:
            return BadRecordError("redirect", "", f"{title} to {target}")
        if (model := texts.get("model", "wikitext").strip()) != "wikitext":
            return BadRecordError("media_type", "model", f"{ascii(model)[:100]} is not read")
        return {
            self.text_field: plain_text(texts.get("text", ""), dropped=dropped),
            "url": f"{base}/{quote(title.replace(' ', '_'), safe=SAFE)}" if base and title else None,
            "title": title or None,
            "time": texts.get("timestamp"),
            "media_type": "text/x-wiki",
        }
