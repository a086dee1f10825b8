"""The page as text: every section, explicit gaps, no external resources, everything escaped."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.support.report.report_example import example, points, rl_report, sft_report

from whorl.errors import CorruptArtifactError
from whorl.objectives.catalog import CATALOG
from whorl.recipes.steps.evaluation.report import _environment as step_environment
from whorl.report import ReportData, render
from whorl.report import blocks as records
from whorl.report.charts import Series, line_chart, ticks
from whorl.report.format import (
    NBSP,
    format_duration,
    format_number,
    format_percent,
    format_quantity,
    format_si,
)
from whorl.report.induction_onset import (
    CurvePoint,
    InductionPoint,
    find_induction_onset,
    find_loss_drop,
)
from whorl.report.render import to_html
from whorl.report.stages import stage_curves
from whorl.report.training import plan_table, training_blocks

EVIL = "<script>alert(1)</script>\"'&</style>"
VOID = {"meta", "link", "br", "line", "circle", "polyline"}


class _Balanced(HTMLParser):
    """Checks that tags close in order; collects attributes that would load a resource."""

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


@pytest.fixture(scope="module")
def full_page() -> str:
    return to_html(example())


@pytest.mark.parametrize("data", [example(), ReportData()], ids=["full", "empty"])
def test_page_is_well_formed_and_self_contained(data: ReportData) -> None:
    page = to_html(data)
    parsed = _parse(page)
    assert parsed.loads == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(re.findall(r'href="#(\w+)"', page)) <= set(parsed.ids)
    assert len(page) < 400_000


FIGURES = """0.941 | 1,053,312 | 5 min 09 s | +3.1 % | drop, step | 63 of 100 | without generated code | 2.56 |
4d4d4d4d4d4d | no longer in the store | parents listed above | 1 found in the store | whorl sample"""


def test_page_contains_figures(full_page: str) -> None:
    page = full_page.replace(NBSP, " ")
    assert [figure for figure in re.split(r"\s*\|\s*", FIGURES) if figure not in page] == []
    # Sorted by score; the row of the model is marked.
    bits = [float(b) for b in re.findall(r'<td class="n">(\d\.\d{3})</td><td class="n optional">', page)]
    assert bits == sorted(bits) and len(bits) == 5
    assert page.count('<tr class="model">') == 1


def test_unfinished_run_names_missing_steps(full_page: str) -> None:
    page = to_html(ReportData(missing=["evaluate", "rl"]))
    assert "has not reached <code>evaluate</code>, <code>rl</code>" in page
    assert "missing" not in re.sub(r"<style>.*</style>", "", full_page, flags=re.S)
    assert "No result yet" in to_html(ReportData())


def test_sections_stand_youngest_step_first(full_page: str) -> None:
    sections = re.findall(r'<section id="(\w+)"', full_page)
    assert sections == [
        "result", "after_pretraining", "samples", "bits_per_byte", "training", "model", "tokenizer", "plan", "corpus",
        "time", "lineage", "environment",
    ]  # fmt: skip
    assert re.findall(r'href="#(\w+)"', full_page) == sections
    assert full_page.index("compresses text that it has not seen to 0.941") < full_page.index('class="cards"')
    bare = to_html(ReportData(reports=[("sft", sft_report())]))
    assert re.findall(r'<section id="(\w+)"', bare) == ["result", "after_pretraining"]


def test_section_ids_are_unique_and_not_reserved() -> None:
    text = [records.Text(section=name, lines=["x"]) for name in ("Time", "A b", "a-b", "!", "tip")]
    page = to_html(ReportData(reports=[("mine", records.StepReport(blocks=text))]))
    ids = re.findall(r'<section id="(\w+)"', page)
    assert ids == ["result", "time_2", "a_b", "a_b_2", "section", "tip_2"]


def test_tables_of_two_steps_are_joined() -> None:
    def table(columns: str, *rows: str) -> records.Table:
        named = [records.Column(name=name) for name in columns.split()]
        return records.Table(title="t", columns=named, rows=[row.split() for row in rows])

    joined = records.join_tables(table("k planned", "a 1", "b 2"), table("k actual", "b 3", "c 4"))
    assert [column.name for column in joined.columns] == ["k", "planned", "actual"]
    assert joined.rows == [["a", "1", "–"], ["b", "2", "3"], ["c", "–", "4"]]
    again = records.join_tables(joined, table("k planned", "c 5", "a 9"))
    assert again.rows == [["a", "1", "–"], ["b", "2", "3"], ["c", "5", "4"]]  # what is there stays


def test_report_file_survives_round_trip_and_names_bad_field(tmp_path: Path) -> None:
    for _, report in example().reports:
        (tmp_path / "report.json").unlink(missing_ok=True)
        report.write(tmp_path)
        assert records.StepReport.read(tmp_path / "report.json") == report
    (tmp_path / "report.json").write_text('{"blocks": [{"kind": "curve", "lines": []}]}')
    with pytest.raises(
        CorruptArtifactError, match=r"report.json: not a list of report blocks; blocks.0.curve.lines"
    ):
        records.StepReport.read(tmp_path / "report.json")
    records.StepReport().write(tmp_path / "new")  # nothing to report: no file
    assert not (tmp_path / "new").exists()


def test_stages_show_before_and_after(full_page: str) -> None:
    page = full_page.replace(NBSP, " ")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page))
    assert "sft1,500 texts––0.941 → 0.946 (+0.5 %)31 s" in text
    assert "25 % → 62 %50 % → 75 %0.946 → 0.951 (+0.5 %)1 min 28 s" in text
    assert "Of the first 2 of 128, 0 passed before and 1 after." in text
    assert "✗ before: not passed syntax: invalid syntax (line 2)" in text and "✓ after: passed" in text
    assert "before: not passed, reward 0.250 empty: adds nothing" in text and "empty" in text
    assert "Accuracy on held-out tasks" in text and "25 % before rl" in text
    for title in ("sft: loss", "rl: accuracy", "rl: completion length"):
        assert f"<h3>{title}</h3>" in page
    # A column needs at least one measurement.
    bare = to_html(ReportData(reports=[("rl", rl_report({"bits_per_byte": {}}))]))
    assert "Accuracy, greedy" in bare and "Bits per byte</th>" not in bare


def test_page_names_minimized_objectives(full_page: str) -> None:
    for name in ("next_token", "sft", "dr_grpo"):
        info = CATALOG[name]
        assert escape(info.formula) in full_page and escape(info.paper) in full_page
    assert full_page.count("<h3>Objectives</h3>") == 1


def test_stage_curves_handle_single_points() -> None:
    record = {"step": 1, "accuracy": 1.0, "completion_length/mean": 7.0, "completion_length/incorrect": 0.0}
    drawn = [*stage_curves("rl", [record], ("loss", "")), *stage_curves("quantize", [], ("loss", ""))]
    assert [curve.title for curve in drawn] == ["rl: accuracy", "rl: completion length"]
    assert [line.name for line in drawn[1].lines] == ["all"]
    blocks = records.StepReport(blocks=drawn)
    assert "nan" not in to_html(ReportData(reports=[("rl", blocks)])).split("<main>")[1].split("<script>")[0]


def _poisoned(value: object) -> object:
    """Replace every free text of the example by markup."""
    if isinstance(value, dict):
        fixed = {"kind", "unit", "style"}
        return {k: v if k in fixed and v in KINDS else _poisoned(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_poisoned(v) for v in value]
    return EVIL if isinstance(value, str) else value


KINDS = {
    "", "model", "ngram", "compressor", "main", "faint", "share", "prose", "code", "list", "curve", "table", "histogram",
    "text", "facts", "sample", "answers",
}  # fmt: skip


def test_markup_in_data_is_escaped() -> None:
    poisoned = ReportData.model_validate(_poisoned(example().model_dump(mode="json")))
    page = to_html(poisoned)
    assert "<script>alert" not in page and "alert(1)&lt;/script&gt;" in page
    assert page.count("<script") == 1 and page.count("</style>") == 1
    _parse(page)


def test_render_writes_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_page: str) -> None:
    out = tmp_path / "new" / "report.html"
    assert render(example(), out) == out
    assert out.read_text("utf-8") == full_page

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    before = out.read_bytes()
    with pytest.raises(OSError, match="No space"):
        render(ReportData(), out)
    assert out.read_bytes() == before
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]


def test_report_data_refuses_invalid_values() -> None:
    for block in (
        {"kind": "picture"},
        {"kind": "sample", "prompt": "", "tokens": [{"text": "a", "probability": 1.5}]},
        {"kind": "curve", "lines": [{"name": "a", "x": [1], "y": [float("nan")]}]},
    ):
        with pytest.raises(ValidationError):
            ReportData.model_validate({"reports": [("a", {"blocks": [block]})]})


def test_printable_token_shows_partial_characters() -> None:
    assert records.printable_token("é\n".encode()) == "é\n"
    assert records.printable_token(b"a\xe2\x82") == "a<e2><82>"
    token = records.SampleToken.of_bytes(b"\xe2", 0.5, [(b"a", 0.25)])
    assert (token.text, token.alternatives) == ("<e2>", [("a", 0.25)])


# Drop of the loss


def _points(n: int, drop_at: int | None) -> list[CurvePoint]:
    return [
        CurvePoint(int(p["step"]), p["nll"], p["learning_rate"], p["seconds"]) for p in points(n, drop_at)
    ]


@pytest.mark.parametrize("n", [600, 2400])
@pytest.mark.parametrize("where", [0.2, 0.4, 0.55])
def test_find_loss_drop_locates_drop(n: int, where: float) -> None:
    drop = find_loss_drop(_points(n, round(n * where)))
    assert drop is not None
    assert drop.step == pytest.approx(n * where, rel=0.15)
    assert 0.25 < drop.before - drop.after < 1.2
    assert drop.seconds == pytest.approx(drop.step * 0.125)


@pytest.mark.parametrize("n", [10, 600, 2400])
def test_find_loss_drop_ignores_smooth_curve(n: int) -> None:
    # The decay of the learning rate lowers the loss at the end; this does not count.
    assert find_loss_drop(_points(n, None)) is None


# Charts and numbers


def test_line_chart_clips_and_downsamples() -> None:
    n = 5000
    x = [float(i) for i in range(n)]
    markup = line_chart([Series("a<b", x, [1.0] * n)], label='say "this"', x_range=(0, n - 1))
    first = re.search(r'points="([^"]*)"', markup)
    assert first is not None and len(first[1].split()) <= 420
    assert first[1].split()[-1].startswith("748.0,")  # the last point is kept
    assert "a<b" not in markup and "say &quot;this&quot;" in markup
    assert markup.count('overflow="hidden"') == 2  # wide and narrow


TICKS = {
    (0, 1): [0, 0.2, 0.4, 0.6, 0.8, 1],
    (0.9, 1.45): [0.9, 1.0, 1.1, 1.2, 1.3, 1.4],
    (3, 2403): [500, 1000, 1500, 2000],
}


@pytest.mark.parametrize("low, high", TICKS)
def test_ticks_are_round(low: float, high: float) -> None:
    assert ticks(low, high, 5) == pytest.approx(TICKS[low, high])


NUMBERS = [
    (format_number, {0.9412: "0.941", 16_600: "16,600", 3.1e13: "3.10e13", -0.5: "−0.500", 0.00001: "1.00e−5"}),
    (format_duration, {0.01: "< 0.1 s", 9.96: "10 s", 59.7: "1 min 00 s", 7_800: "2 h 10 min"}),
    (format_percent, {0.9999: "100 %", 0.055: "5.5 %"}),
]  # fmt: skip
QUANTITIES = [
    (format_si, {(1_048_576, ""): "1.05 M", (999_900, "B"): "1.00 MB", (0, "B"): "0 B"}),
    (format_quantity, {(None, "s"): "–", (3e13, "FLOP"): "30.0 TFLOP", (0.31, "share"): "31 %"}),
    (format_quantity, {(16_600, "tokens/s"): "16,600 /s", (4, ""): "4"}),
]


def test_format_numbers() -> None:
    for function, texts in NUMBERS:
        assert {value: function(value).replace(NBSP, " ") for value in texts} == texts
    for with_unit, texts in QUANTITIES:
        assert {quantity: with_unit(*quantity).replace(NBSP, " ") for quantity in texts} == texts
    assert format_number(float("nan")) == "–"


def test_find_induction_onset_needs_clear_drop() -> None:
    points = [CurvePoint(step=s, loss=3.0, seconds=s / 10) for s in range(0, 1001, 10)]
    induction = [InductionPoint(step=s, nll=7.0 if s < 400 else 2.0) for s in range(100, 1001, 100)]
    drop = find_induction_onset(induction, points)
    assert drop is not None and drop.step == 400 and drop.seconds == 40.0 and drop.from_copy_loss
    slow = [InductionPoint(step=s, nll=7.0 - s / 2000) for s in range(100, 1001, 100)]
    assert find_induction_onset(slow, points) is None
    assert find_induction_onset([], points) is None
    rising = [InductionPoint(step=s, nll=6.4 + s / 140) for s in range(0, 1001, 100)]
    assert find_induction_onset(rising, points) is None  # more memorized, less copied
    back = find_induction_onset([*induction, InductionPoint(step=1100, nll=9.0)], points)
    assert back is not None and (back.before, back.after, back.end_step) == (7.0, 2.0, 400)


def test_expert_loads_are_drawn_and_described() -> None:
    def layer(number: int, gini: float, shares: list[float]) -> dict[str, float]:
        figures = {f"moe/{number}/load_fraction/{i}": share for i, share in enumerate(shares)}
        return {**figures, f"moe/{number}/gini": gini, f"moe/{number}/dropped_fraction": 0.02 * number}

    curve: list[dict[str, float]] = [{"step": s, "nll": 3.0 - s} for s in (1, 2)]
    curve[0] |= layer(0, 0.5, [0.25] * 4) | layer(1, 0.5, [0.25] * 4)
    curve[1] |= layer(0, 0.1, [0.2, 0.3, 0.25, 0.25]) | layer(1, 0.3, [0.1, 0.4, 0.25, 0.25])
    drawn = {block.title: block for block in training_blocks(curve)}
    experts = drawn["Experts"]
    assert isinstance(experts, records.Curve)
    assert "ending at 0.200" in experts.label and [line.name for line in experts.lines][1:] == [
        "layer 1",
        "mean",
    ]
    plain = experts.note.replace(NBSP, " ")
    assert "least used expert of a layer had 10 %" in plain and "most used 40 %" in plain
    assert "equal loads would be 25 %" in plain and "Dropped assignments: at most 2.0 %" in plain


def test_environment_is_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_THREADS", "2")
    found = step_environment()
    assert found["memory"].endswith("B") and "torch" in found and found["settings WHORL_THREADS"] == "2"
    assert not any("_" in key for key in found if not key.startswith("settings "))


def test_plan_and_outcome_lists_what_may_differ() -> None:
    fixed = {"parameters": 27e6, "flops_per_token": 1e7, "tokens": 5e6, "epochs": 0.5}
    outcome = {"seconds": 309.2, "tokens_per_second": 15_900.0, "parameters": 27e6, "tokens": 5e6}
    table = plan_table({"seconds": 300.0, "tokens_per_second": 16_600.0, **fixed}, outcome)
    assert [row[0] for row in table.rows] == ["training time", "speed"]
    assert [row[3] for row in table.rows] == [f"+3.1{NBSP}%", f"\N{MINUS SIGN}4.2{NBSP}%"]
