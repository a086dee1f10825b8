"""The content of a page: the reports of its steps, in blocks, and what belongs to the run as a whole.

The report draws and measures nothing; it opens no artifact. The page can be rendered from a test, a notebook or an
interrupted run. Units are part of the names.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.report.blocks import StepReport

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _ReportModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StepTime(_ReportModel):
    """One step of the recipe. `cached`: an earlier run made the artifact; the time is that of the earlier run."""

    step: str
    seconds: Positive
    cached: bool = False
    bytes: Count | None = None
    note: str = ""


class TimeSection(_ReportModel):
    """Time per step; `cost_per_hour` and `currency` add a cost column."""

    steps: list[StepTime]
    budget_seconds: Positive | None = None
    cost_per_hour: Positive | None = None
    currency: str = "USD"


class LineageNode(BaseModel):
    """A node of `Store.lineage`; fields that the page does not show are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    address: str
    kind: str = ""
    name: str = ""
    seconds: Positive | None = None
    bytes: Count | None = None
    missing: bool = False
    config: dict[str, Any] = {}
    parents: dict[str, LineageNode] = {}


class ReportData(_ReportModel):
    """The content of the whole page.

    reports: (name of the step, its blocks), in the order of their making.
    missing: steps that the run has not reached.
    left_out, failed: step -> reason.
    next_commands: shell commands shown at the end.
    """

    title: str = "A small language model"
    about: str = ""
    run: str = ""
    created: str = ""
    reports: list[tuple[str, StepReport]] = []
    missing: list[str] = []
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    time: TimeSection | None = None
    lineage: LineageNode | None = None
    environment: dict[str, str] = {}
    next_commands: list[str] = []
