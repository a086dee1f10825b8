"""Jupyter notebooks: one record, the cells of Markdown and of code in their order. Outputs are left out.

Code is fenced, with the notebook's language. The text is Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whorl.data.formats.jsonl import parse_object
from whorl.data.formats.text import MARK
from whorl.data.formats.web import PDF
from whorl.data.quarantine import BadRecordError


class Notebook(PDF):
    """See the top of this file."""

    extracts = False
    media_type = "application/x-ipynb+json"

    def _value(self, data: bytes) -> dict[str, Any]:
        notebook = parse_object(data.removeprefix(MARK))
        if isinstance(notebook, BadRecordError):
            raise notebook
        try:
            about = notebook.get("metadata", {})
            language = about.get("kernelspec", {}).get("language") or about.get("language_info", {}).get(
                "name", ""
            )
            sheets = notebook.get("worksheets") or [notebook]  # of version 3
            texts = (_text(cell, language) for sheet in sheets for cell in sheet["cells"])
            return {self.text_field: "\n\n".join(filter(None, texts)), "media_type": self.media_type}
        except (AttributeError, KeyError, TypeError) as error:
            raise BadRecordError("bad_json", "", f"no list of cells: {error!r}"[:200]) from None


def _text(cell: Mapping[str, Any], language: str) -> str:
    source = cell.get("source", cell.get("input", ""))
    text = (source if isinstance(source, str) else "".join(source)).strip("\n")
    if cell["cell_type"] == "code":
        return f"```{language}\n{text}\n```" if text else ""
    return text if cell["cell_type"] in ("markdown", "heading") else ""
