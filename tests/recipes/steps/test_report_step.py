"""The step `report` draws the blocks of any step, also of one that the package does not have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from whorl.cli.jobs.report import report
from whorl.recipes import StepContext, StepKind, parse_recipe, run_recipe, step_kinds
from whorl.report.blocks import Bar, Card, Column, Curve, Histogram, Line, Table, Text
from whorl.store import Store
from whorl.tracking.progress import Progress


class ProbeConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: float = 0.25


def write_probe(ctx: StepContext, config: ProbeConfig) -> None:
    """Write a file and one block of each common kind, as a step of a user does."""
    (ctx.out / "probe.txt").write_text(str(config.value))
    ctx.report.cards.append(Card(label="Probe value", value=f"{config.value}"))
    columns = [Column(name="Bin"), Column(name="Count", number=True)]
    bars = [Bar(cells=["low", "3"], value=3), Bar(cells=["high", "1"], value=1)]
    ctx.report.blocks += [
        Curve(title="Probe curve", lines=[Line(name="v", x=[0, 1], y=[0, config.value])]),
        Table(title="Probe table", columns=[Column(name="Layer")], rows=[["layer 7"]]),
        Histogram(title="Probe histogram", columns=columns, bars=bars),
        Text(title="Probe text", lines=["found <nothing>"]),
    ]


def make_page(step: Any, store: Path) -> str:
    """Run a recipe with `step`, which is no step of the package, and return its report."""
    probe = StepKind("probe", "anything", ProbeConfig, {}, 1, "Measures.", step, None)
    kinds = {"probe": probe, "report": step_kinds()["report"]}
    text = 'name = "mine"\n[steps.depth]\nuses = "probe"\n[steps.report]\nparents = {any = "depth"}\n'
    made = run_recipe(parse_recipe(text, "r.toml", kinds=kinds), Store(store), Progress.silent()).artifacts
    return made["report"].file("report.html").read_text()


def test_step_outside_the_package_has_its_panel(tmp_path: Path) -> None:
    page = make_page(write_probe, tmp_path)
    assert re.findall(r'<section id="(\w+)"', page) == ["result", "depth", "time", "lineage", "environment"]
    for title in ("Probe curve", "Probe table", "Probe histogram", "Probe text"):
        assert f"<h3>{title}</h3>" in page
    assert "layer 7" in page and "found &lt;nothing&gt;" in page and "Probe value" in page
    report(run="mine", out=tmp_path / "again.html", store=str(tmp_path))
    assert "<h3>Probe curve</h3>" in (tmp_path / "again.html").read_text()


def test_artifact_without_blocks_still_renders(tmp_path: Path) -> None:
    page = make_page(lambda ctx, config: (ctx.out / "probe.txt").write_text(""), tmp_path)
    assert re.findall(r'<section id="(\w+)"', page) == ["result", "time", "lineage", "environment"]


def test_title_names_the_sources_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text(
        "The keeper of the lighthouse wrote a letter every evening.\n" * 9
    )
    text = f'name = "mine"\n[steps.ingest]\nsources = ["{tmp_path}/notes/"]\n[steps.report]\nparents = ["ingest"]\n'
    made = run_recipe(parse_recipe(text, "r.toml"), Store(tmp_path / "store"), Progress.silent()).artifacts
    assert (
        f"<h1>A small language model of {tmp_path}/notes/</h1>"
        in made["report"].file("report.html").read_text()
    )
