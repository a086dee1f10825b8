"""The page as text: every section, nothing missing silently, nothing from outside, nothing unescaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.support.report.report_example import example, points

from whorl.report import ReportData, render
from whorl.report.charts import Series, line_chart, ticks
from whorl.report.data import CurvePoint, SampleToken, StagePoint, StageSection, printable_token
from whorl.report.format import (
    NBSP,
    format_duration,
    format_number,
    format_percent,
    format_quantity,
    format_si,
)
from whorl.report.induction_onset import find_loss_drop, smooth
from whorl.report.render import to_html
from whorl.report.stages import stage_charts

EVIL = "<script>alert(1)</script>\"'&</style>"
VOID = {"meta", "link", "br", "line", "circle", "polyline"}


class _Balanced(HTMLParser):
    """Tags must close in order; collects what would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "data", "action") and not re.match(r"#|data:,", value or ""):
                self.loads.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def _parse(page: str) -> _Balanced:
    parser = _Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("data", [example(), ReportData()], ids=["full", "empty"])
def test_is_well_formed_and_loads_nothing(data: ReportData) -> None:
    page = to_html(data)
    parsed = _parse(page)
    assert parsed.loads == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(re.findall(r'href="#(\w+)"', page)) <= set(parsed.ids)
    assert len(page) < 400_000


def test_says_the_figures() -> None:
    page = to_html(example()).replace(NBSP, " ")
    for words in (
        "0.941",
        "1,053,312",
        "5 min 09 s",
        "+3.1 %",
        "the fall, step",
        "63 of 100",
        "without generated code",
        "2.56",
        "4d4d4d4d4d4d",
        "no longer in the store",
        "its parents stand above",
        "1 looked up",
        "whorl sample",
    ):
        assert words in page
    # Best first, and the model's own row stands out.
    bits = [float(b) for b in re.findall(r'<td class="n">(\d\.\d{3})</td><td class="n optional">', page)]
    assert bits == sorted(bits) and len(bits) == 11
    assert page.count('<tr class="model">') == 1


def test_an_unfinished_run_says_what_is_missing() -> None:
    page = to_html(ReportData())
    assert page.count('class="missing"') == 11
    for step in ("evaluate", "pretrain", "sft", "plan", "curate", "tokenizer"):
        assert f"has not reached <code>{step}</code>" in page
    assert "missing" not in re.sub(r"<style>.*</style>", "", to_html(example()), flags=re.S)


def test_a_recipe_without_pretraining_says_nothing_of_it() -> None:
    absent = ["scores", "samples", "training", "plan", "corpus", "tokenizer"]
    full = example()
    page = to_html(ReportData(omitted_sections=absent, stages=full.stages, model=full.model, time=full.time))
    assert re.findall(r'<section id="(\w+)"', page) == [
        "result", "stages", "plan", "time", "lineage", "environment",
    ]  # fmt: skip
    assert re.findall(r'href="#(\w+)"', page) == re.findall(r'<section id="(\w+)"', page)
    assert "<h2>The model</h2>" in page and "There is no plan" not in page and ">Stages</h2>" in page
    assert "<code>evaluate</code>" not in to_html(ReportData(omitted_sections=absent))


def test_stages_are_told_by_before_and_after() -> None:
    page = to_html(example()).replace(NBSP, " ")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page))
    assert "sft1,500 texts––0.941 → 0.946 (+0.5 %)31 s" in text
    assert "25 % → 62 %50 % → 75 %0.946 → 0.951 (+0.5 %)1 min 28 s" in text
    assert "Of the first 2 of 128, 0 passed before and 1 after." in text
    assert "✗ before: not passed syntax: invalid syntax (line 2)" in text and "✓ after: passed" in text
    assert "before: not passed, reward 0.250 empty: adds nothing" in text and "said nothing" in text
    assert "Held-out tasks passed" in text and "25 % before rl" in text
    for title in ("sft: loss", "rl: share of answers that passed", "rl: length of answers"):
        assert f"<h3>{title}</h3>" in page
    # What no stage measured has no column.
    alone = [stage.model_copy(update={"bits_per_byte": None}) for stage in example().stages]
    assert (
        "Passed, greedy" in (bare := to_html(ReportData(stages=alone))) and "Bits per byte</th>" not in bare
    )


def test_a_stage_of_one_step_and_one_without_a_wrong_answer_are_drawn() -> None:
    points = [StagePoint(step=1, accuracy=1.0, completion_length=7.0, completion_length_incorrect=0.0)]
    drawn = list(stage_charts([StageSection(name="rl", points=points), StageSection(name="quantize")]))
    assert [title for title, _, _ in drawn] == [
        "rl: share of answers that passed", "rl: length of answers",
    ]  # fmt: skip
    assert "all answers" in drawn[1][2] and "wrong answers" not in drawn[1][2]
    assert "not finite" not in drawn[0][2] and "nan" not in drawn[0][2]


def _poisoned(value: object) -> object:
    """Every free text of the example replaced by markup."""
    if isinstance(value, dict):
        fixed = {"kind", "unit"}
        return {k: v if k in fixed and v in KINDS else _poisoned(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_poisoned(v) for v in value]
    return EVIL if isinstance(value, str) else value


KINDS = {"model", "ngram", "compressor", "", "s", "bytes", "tokens", "tokens/s", "FLOP", "bits/byte"}


def test_markup_in_the_data_stays_text() -> None:
    poisoned = ReportData.model_validate(_poisoned(example().model_dump(mode="json")))
    page = to_html(poisoned)
    assert "<script>alert" not in page and "alert(1)&lt;/script&gt;" in page
    assert page.count("<script") == 1 and page.count("</style>") == 1
    _parse(page)


def test_render_writes_whole_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "report.html"
    assert render(example(), out) == out
    assert out.read_text("utf-8") == to_html(example())

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    before = out.read_bytes()
    with pytest.raises(OSError, match="No space"):
        render(ReportData(), out)
    assert out.read_bytes() == before
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]


def test_data_refuses_what_cannot_be() -> None:
    for bad in (
        {"scores": {"files": 1, "bytes": 1, "score": []}},
        {"samples": [{"prompt": "", "tokens": [{"text": "a", "probability": 1.5}]}]},
        {"training": {"points": [{"step": 1, "loss": float("nan")}]}},
    ):
        with pytest.raises(ValidationError):
            ReportData.model_validate(bad)


def test_token_bytes_that_are_no_character() -> None:
    assert printable_token("é\n".encode()) == "é\n"
    assert printable_token(b"a\xe2\x82") == "a<e2><82>"
    token = SampleToken.of_bytes(b"\xe2", 0.5, [(b"a", 0.25)])
    assert (token.text, token.alternatives) == ("<e2>", [("a", 0.25)])


# The fall


def _points(n: int, fall_at: int | None) -> list[CurvePoint]:
    return [CurvePoint.model_validate(point) for point in points(n, fall_at)]


@pytest.mark.parametrize("n", [600, 2400])
@pytest.mark.parametrize("where", [0.2, 0.4, 0.55])
def test_the_fall_is_found_where_it_is(n: int, where: float) -> None:
    fall = find_loss_drop(_points(n, round(n * where)))
    assert fall is not None
    assert fall.step == pytest.approx(n * where, rel=0.15)
    assert 0.25 < fall.before - fall.after < 1.2
    assert fall.seconds == pytest.approx(fall.step * 0.125)


@pytest.mark.parametrize("n", [10, 600, 2400])
def test_a_smooth_curve_has_no_fall(n: int) -> None:
    # The decay of the learning rate brings the loss down at the end: that is not it.
    assert find_loss_drop(_points(n, None)) is None


def test_smoothing_shifts_nothing() -> None:
    ramp = [float(i) for i in range(200)]
    assert smooth(ramp, 5)[50:150] == pytest.approx(ramp[50:150], abs=0.05)
    assert smooth([3.0] * 9, 2) == pytest.approx([3.0] * 9)


# Charts and figures


def test_chart_clips_and_thins() -> None:
    n = 5000
    x = [float(i) for i in range(n)]
    markup = line_chart([Series("a<b", x, [1.0] * n)], label='say "this"', x_range=(0, n - 1))
    first = re.search(r'points="([^"]*)"', markup)
    assert first is not None and len(first[1].split()) <= 420
    assert first[1].split()[-1].startswith("748.0,")  # the curve ends where the run did
    assert "a<b" not in markup and "say &quot;this&quot;" in markup
    assert markup.count('overflow="hidden"') == 2  # in both widths


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.9, 1.45, [0.9, 1.0, 1.1, 1.2, 1.3, 1.4]),
        (3, 2403, [500, 1000, 1500, 2000]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_number(0.9412), "0.941"),
        (format_number(16_600), "16,600"),
        (format_number(3.1e13), "3.10e13"),
        (format_number(-0.5), "−0.500"),
        (format_number(float("nan")), "–"),
        (format_number(0.00001), "1.00e−5"),
        (format_si(1_048_576, ""), "1.05 M"),
        (format_si(999_900, "B"), "1.00 MB"),
        (format_si(0, "B"), "0 B"),
        (format_duration(0.01), "< 0.1 s"),
        (format_duration(9.96), "10 s"),
        (format_duration(59.7), "1 min 00 s"),
        (format_duration(7_800), "2 h 10 min"),
        (format_percent(0.9999), "100 %"),
        (format_percent(0.055), "5.5 %"),
        (format_quantity(None, "s"), "–"),
        (format_quantity(3e13, "FLOP"), "30.0 TFLOP"),
        (format_quantity(0.31, "share"), "31 %"),
        (format_quantity(16_600, "tokens/s"), "16,600 /s"),
        (format_quantity(4, ""), "4"),
    ],
)
def test_figures(text: str, expected: str) -> None:
    assert text.replace(NBSP, " ") == expected


def test_copying_that_was_learnt_marks_the_fall_and_copying_that_was_not_does_not() -> None:
    from whorl.report.data import CurvePoint, InductionPoint
    from whorl.report.induction_onset import find_induction_onset

    points = [CurvePoint(step=s, loss=3.0, seconds=s / 10) for s in range(0, 1001, 10)]
    learnt = [InductionPoint(step=s, nll=7.0 if s < 400 else 2.0) for s in range(100, 1001, 100)]
    fall = find_induction_onset(learnt, points)
    assert fall is not None and fall.step == 400 and fall.seconds == 40.0 and fall.from_copy_loss
    assert (
        find_induction_onset(
            [InductionPoint(step=s, nll=7.0 - s / 2000) for s in range(100, 1001, 100)], points
        )
        is None
    )
    assert find_induction_onset([], points) is None


def test_the_use_of_experts_is_drawn_and_told() -> None:
    from whorl.report.data import CurvePoint, ExpertUsage, GiniPoint, TrainingSection
    from whorl.report.training import training_charts

    def layer(number: int, last: float, shares: list[float]) -> ExpertUsage:
        return ExpertUsage(
            layer=number,
            gini_points=[GiniPoint(step=1, gini=0.5), GiniPoint(step=2, gini=last)],
            load_fractions=shares,
            dropped_fraction=0.02 * number,
        )

    points = [CurvePoint(step=s, loss=3.0 - s) for s in (1, 2)]
    layers = [layer(0, 0.1, [0.2, 0.3, 0.25, 0.25]), layer(1, 0.3, [0.1, 0.4, 0.25, 0.25])]
    drawn = {
        title: (note, svg)
        for title, note, svg in training_charts(TrainingSection(points=points, experts=layers), None)
    }
    note, svg = drawn["Experts"]
    assert "ending at a Gini coefficient of 0.200" in svg and "layer 1" in svg
    plain = note.replace(NBSP, " ")
    assert "least used expert of a layer had 10 %" in plain and "most used 40 %" in plain
    assert "even would be 25 %" in plain and "found no place: at most 2.0 %" in plain
