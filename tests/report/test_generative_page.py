"""The page of a generative model in Chromium: samples, held-out data and views as pictures, and the measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whorl.generative.data import Data, DataInfo
from whorl.generative.measures import SampleMeasure
from whorl.generative.saved_model import SavedMeasures
from whorl.generative.trained import Findings
from whorl.generative.views import GuidanceFigure, View
from whorl.report import ReportData, render
from whorl.report.generative import model_report

pytestmark = pytest.mark.browser
INFO = DataInfo(name="digits", shape=(1, 8, 8), fingerprint="x")


def test_page_shows_samples_data_and_views(browser: Any, tmp_path: Path) -> None:
    measured = SampleMeasure(name="nearest", value=2.5, interval=(2.0, 3.0), floor=2.25, note="a note")
    saved = SavedMeasures(
        method="flow", data="digits", fingerprint="x", shape=(1, 8, 8), parameters=1234, steps=20, seconds=3.0,
        sample_seconds=0.5, measures=(measured,), diagnosis={"units": 16},
    )  # fmt: skip
    rows = torch.rand(99, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    figures = (GuidanceFigure("guidance 2", 0.62, 0.125), GuidanceFigure("real data", 0.97, 0.5))
    views = (
        View("Samples by step", "From top to bottom.", np.zeros((60, 80, 3), np.uint8)),
        View("Guidance against diversity", "Class 5.", np.zeros((30, 1548, 3), np.uint8), figures),
    )
    report = model_report(Findings(saved, rows, views), Data(INFO, rows, rows[:9]))
    path = render(ReportData(title=saved.title, reports=[("flow", report)]), tmp_path / "page.html")
    page, messages = browser.new_page(viewport={"width": 800, "height": 600}), list[str]()
    page.on("console", lambda message: messages.append(message.text))
    page.goto(path.as_uri())
    widths = page.locator("img").evaluate_all("images => images.map(i => i.naturalWidth)")
    assert widths == [8 * 34, 3 * 34, 80, 1548] and not messages  # 8 x 8 pictures are enlarged four times
    assert page.evaluate("document.documentElement.scrollWidth") <= 800  # a wide view shrinks
    text = page.inner_text("body")
    for words in (
        "flow on digits", "64 samples", "9 rows", "Held-out data", "nearest", "2.5", "[2, 3]", "2.25", "a note", "1,234",
        "units", "Samples by step", "From top to bottom.", "Guidance against diversity", "Class 5.",
    ):  # fmt: skip
        assert words in text, words
    cells = page.locator("table").last.locator("td").all_inner_texts()
    assert cells == ["guidance 2", "62%", "0.125", "real data", "97%", "0.500"]
    page.close()


def test_result_of_a_method_without_samples_is_its_diagnosis() -> None:
    saved = SavedMeasures(
        method="ae", data="digits", fingerprint="x", shape=(1, 8, 8), parameters=1234, steps=20, seconds=3.0,
        sample_seconds=0.0, measures=(), diagnosis={"reconstruction_mse": 0.125},
    )  # fmt: skip
    rows = torch.zeros(4, 1, 8, 8)
    report = model_report(Findings(saved, rows, ()), Data(INFO, rows, rows))
    assert [(card.label, card.value) for card in report.cards] == [("Reconstruction mse", "0.125")]
