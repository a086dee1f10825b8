"""The page of an evaluation without a browser: packed items, figures, escaping, bad input."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.report.evaluation_example import write_evaluation

from whorl.errors import ConfigError, DataError
from whorl.evals.results import ItemResult, Outcome
from whorl.report.evaluation import write_page
from whorl.report.evaluation.embed import ABSENT, CHUNK_ITEMS, pack, unpack
from whorl.report.evaluation.figures import pareto_hull, reliability_bins

BLOCK = re.compile(r'<script type="text/plain" id="([\w-]+)">([^<]*)</script>')


def blocks(page: Path) -> dict[str, Any]:
    return {name: unpack(text) for name, text in BLOCK.findall(page.read_text())}


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), st.lists))
def test_pack_keeps_values_without_markup(value: Any) -> None:
    text = pack(value)
    assert "<" not in text
    json.dumps(value).encode()
    assert unpack(text) == json.loads(json.dumps(value).encode("utf-8", "replace"))


def test_items_of_two_models_are_joined_by_id(tmp_path: Path) -> None:
    n = CHUNK_ITEMS + 10
    a = write_evaluation(tmp_path / "a", "small", n)
    b = write_evaluation(tmp_path / "b", "large", n, seed=1)
    lines = (b / "items-words.jsonl").read_text().splitlines()
    (b / "items-words.jsonl").write_text("\n".join(lines[:0:-1]))  # another order, without the first
    found = blocks(write_page([a, b], tmp_path / "page.html"))
    columns = found["task-0"]
    assert found["contents"]["models"] == ["small", "large"]
    assert columns["ids"] == [f"item-{i:05d}" for i in range(n)]
    assert columns["outcomes"][1][0] == ABSENT and ABSENT not in columns["outcomes"][1][1:]
    assert [len(found[f"task-0-chunk-{k}"]) for k in (0, 1)] == [CHUNK_ITEMS, 10]
    entry = found["task-0-chunk-1"][3]
    assert [side["outcome"] for side in entry["sides"]] == [c[CHUNK_ITEMS + 3] for c in columns["outcomes"]]


def test_summary_has_interval_chance_counts_and_hash(tmp_path: Path) -> None:
    task = {
        "measures": [
            {
                "metric": "acc",
                "value": 0.5,
                "low": 0.4,
                "high": 0.6,
                "n": 20,
                "chance": 0.25,
                "bounds": [0.48, 0.53],
            }
        ]
    }
    folder = write_evaluation(tmp_path / "a", "small", 20, results=task)
    text = write_page(folder, tmp_path / "page.html", verdicts=["A is better."]).read_text()
    for part in (
        "40.0\xa0% to 60.0\xa0%",
        "25.0\xa0%",
        "48.0\xa0% to 53.0\xa0%",
        "0123456789ab",
        "A is better.",
        "Reliability",
    ):
        assert part in text
    assert "Pareto" not in text  # one model


def test_pareto_hull_leaves_out_dominated_and_mixed() -> None:
    points = {
        "a": (1.0, 0.2), "b": (2.0, 0.3), "c": (3.0, 0.8), "d": (3.0, 0.7), "e": (9.0, 0.8), "f": (9.0, 0.9),
    }  # fmt: skip
    assert pareto_hull(points) == ["a", "c", "f"]  # b is below the line from a to c
    assert pareto_hull({"a": (1.0, 0.5), "b": (1.0, 0.5)}) == ["a"]
    assert pareto_hull({}) == []


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12))
def test_no_point_is_above_the_pareto_hull(values: list[tuple[int, int]]) -> None:
    points = {str(i): (float(x), float(y)) for i, (x, y) in enumerate(values)}
    hull = [points[name] for name in pareto_hull(points)]
    assert hull[0][0] == min(x for x, _ in values) and hull[-1][1] == max(y for _, y in values)
    for x, y in points.values():
        for (x0, y0), (x1, y1) in pairwise(hull):
            if x0 <= x <= x1:
                assert (y - y0) * (x1 - x0) <= (y1 - y0) * (x - x0) + 1e-9


def test_several_models_get_cost_charts(tmp_path: Path) -> None:
    folders = [write_evaluation(tmp_path / str(s), f"m{s}", 10, seed=s) for s in range(3)]
    text = write_page(folders, tmp_path / "page.html").read_text()
    assert text.count('class="scatter"') == 3  # time, speed, memory
    notes = re.findall(r"On the Pareto hull: ([^.]*)\.(?: At the same \w+, ([^.]*) costs more)?", text)
    parts = [(hull.split(", "), others.split(", ") if others else []) for hull, others in notes]
    assert len(parts) == 3 and all(sorted(hull + others) == ["m0", "m1", "m2"] for hull, others in parts)
    assert any(others for _, others in parts)


def test_markup_of_models_never_reaches_the_page(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)><!--"

    def spoil(number: int, item: dict[str, Any]) -> dict[str, Any]:
        return item | {
            "item": f"{evil}{number}", "prompt": evil, "answers": [evil], "reason": evil, "group": evil,
        }  # fmt: skip

    measure = {"metric": evil, "about": evil, "value": 0.5, "low": None, "high": None, "n": 5}
    task = {"hash": evil, "notes": [evil], "measures": [measure], "by_group": {evil: measure}}
    folder = write_evaluation(tmp_path / "a", evil, 5, change=spoil, results=task)
    text = write_page([folder, folder], tmp_path / "page.html", title=evil, verdicts=[evil]).read_text()
    assert "<img" not in text and "<!--" not in text
    assert text.count("</script>") == text.count("<script")


def test_different_task_hashes_are_noted(tmp_path: Path) -> None:
    a = write_evaluation(tmp_path / "a", "small", 5)
    b = write_evaluation(tmp_path / "b", "large", 5, results={"hash": "other"})
    assert "do not compare" in write_page([a, b], tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("results.json", None, "results.json cannot be read: No such file"),
        ("results.json", '{"format": 1}', "results.json cannot be read: tasks: Field required"),
        ("items-words.jsonl", None, "items-words.jsonl cannot be read: No such file"),
        (
            "items-words.jsonl",
            '{"item": "1", "scores": {}, "outcome": "right"}\n{"item": ',
            "line 2: Invalid JSON",
        ),
        (
            "items-words.jsonl",
            '{"item": "1", "scores": {}, "outcome": "good"}',
            "line 1: outcome: Input should be",
        ),
        ("items-words.jsonl", "[]", "line 1: Input should be an object"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    folder = write_evaluation(tmp_path / "a", "small", 3)
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        write_page(folder, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        write_page([], tmp_path / "page.html")


def test_nan_is_kept_out_of_json(tmp_path: Path) -> None:
    def spoil(number: int, item: dict[str, Any]) -> dict[str, Any]:
        return item | {"scores": {"acc": float("nan")}}

    folder = write_evaluation(tmp_path / "a", "small", 2, change=spoil)
    found = blocks(write_page(folder, tmp_path / "page.html"))
    assert found["task-0"]["scores"] == [[None, None]]


def test_reliability_bins_weigh_only_items_with_a_verdict() -> None:
    def item(confidence: float | None, outcome: Outcome) -> ItemResult:
        details = {} if confidence is None else {"confidence": confidence}
        return ItemResult("1", {}, outcome, details=details)

    items = [
        item(0.31, "right"), item(0.39, "wrong"), item(1.0, "right"), item(0.35, "missing"),
        item(None, "right"),
    ]  # fmt: skip
    assert reliability_bins(items) == [(pytest.approx(0.35), 0.5, 2), (1.0, 1.0, 1)]
    assert reliability_bins([]) == []
