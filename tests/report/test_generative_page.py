"""The page of a generative model in Chromium: samples and held-out data as pictures, and the measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from whorl.generative.data import DataInfo
from whorl.generative.measures import SampleMeasure
from whorl.generative.saved_model import SavedMeasures
from whorl.report import ReportData, render
from whorl.report.generative import model_report

pytestmark = pytest.mark.browser
INFO = DataInfo(name="digits", shape=(1, 8, 8), fingerprint="x")


def test_page_shows_samples_and_data(browser: Any, tmp_path: Path) -> None:
    measured = SampleMeasure(name="nearest", value=2.5, interval=(2.0, 3.0), floor=2.25, note="a note")
    saved = SavedMeasures(
        method="flow", data="digits", fingerprint="x", shape=(1, 8, 8), parameters=1234, steps=20, seconds=3.0,
        sample_seconds=0.5, measures=(measured,), diagnosis={"units": 16},
    )  # fmt: skip
    rows = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    report = model_report("flow on digits", saved, rows, rows[:9], INFO)
    path = render(ReportData(title="flow on digits", reports=[("flow", report)]), tmp_path / "page.html")
    page, messages = browser.new_page(), list[str]()
    page.on("console", lambda message: messages.append(message.text))
    page.goto(path.as_uri())
    widths = page.locator("img").evaluate_all("images => images.map(i => i.naturalWidth)")
    assert widths == [8 * 34, 3 * 34] and not messages  # 8 x 8 pictures are enlarged four times, with a gap
    text = page.inner_text("body")
    for words in ("Held-out data", "Measure", "nearest", "2.5", "[2, 3]", "2.25", "a note", "1,234", "units"):
        assert words in text, words
    page.close()
