"""Files of the pages: bounded in size, same palette as the report, no markup from strings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.serve.fake_server import PAGES

FILES = sorted(PAGES.iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_page_file_follows_the_rules(file: Path) -> None:
    text = file.read_text()
    assert 50 <= text.count("\n") <= 400
    beginning = {".js": "// ", ".css": "/* ", ".html": "<!doctype html>\n<!-- "}
    assert text.startswith(beginning[file.suffix])
    # No markup or code from strings, no inline style or script, no external resources.
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|javascript:"
    assert re.findall(forbidden, text) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", text) == []
    imported = re.findall(r'from "\./(\S+)"', text) + re.findall(r'="static/(\S+)"', text)
    assert set(imported) <= {f.name for f in FILES}
    if file.suffix == ".html":
        assert re.findall(r"<script(?! type=\"module\" src=)|<style|\sstyle=|\son\w+=", text) == []
        assert "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'" in text


def test_palette_equals_the_report_palette() -> None:
    def palettes(path: Path) -> list[dict[str, str]]:
        blocks = re.findall(r":root \{(.*?)\}", path.read_text(), re.S)
        return [dict(re.findall(r"(--[a-z-]+): (#\w+)", block)) for block in blocks]

    report_palettes = palettes(PAGES.parents[1] / "report" / "style.css")
    ours = palettes(PAGES / "base.css")
    assert len(report_palettes) == 2
    for report, our in zip(report_palettes, ours[:2], strict=True):
        assert report and report.items() <= our.items()
