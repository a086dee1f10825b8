"""The pages' files: shipped, small, alike in colour to the report, and without a way to make markup of a string."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tests.support.serve.fake_server import PAGES

import whorl

FILES = sorted(PAGES.iterdir())
ROOT = Path(__file__).parents[3]


def test_every_file_is_in_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["whorl"]
    package = Path(whorl.__file__).parent
    missing = [f for f in FILES if not any(fnmatch(str(f.relative_to(package)), p) for p in patterns)]
    assert FILES and missing == []


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_a_file_is_of_the_house(file: Path) -> None:
    text = file.read_text()
    assert 50 <= text.count("\n") <= 400
    beginning = {".js": "// ", ".css": "/* ", ".html": "<!doctype html>\n<!-- "}
    assert text.startswith(beginning[file.suffix])
    # No way from a string to markup or code, no style or script in the page, nothing from elsewhere.
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|javascript:"
    assert re.findall(forbidden, text) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", text) == []
    if file.suffix == ".html":
        assert re.findall(r"<script(?! type=\"module\" src=)|<style|\sstyle=|\son\w+=", text) == []
        assert "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'" in text


def test_every_import_and_asset_is_there() -> None:
    names = {file.name for file in FILES}
    for file in FILES:
        text = file.read_text()
        wanted = re.findall(r'from "\./(\S+)"', text) + re.findall(r'="static/(\S+)"', text)
        assert set(wanted) <= names, file.name


def test_the_palette_is_the_reports() -> None:
    def palettes(path: Path) -> list[dict[str, str]]:
        return [
            dict(re.findall(r"(--[a-z-]+): (#\w+)", block))
            for block in re.findall(r":root \{(.*?)\}", path.read_text(), re.S)
        ]

    theirs = palettes(PAGES.parents[1] / "report" / "style.css")
    ours = palettes(PAGES / "base.css")
    assert len(theirs) == 2
    for their, our in zip(theirs, ours[:2], strict=True):
        assert their and their.items() <= our.items()
