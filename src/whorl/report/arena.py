"""The page of an arena: ratings with both intervals, ranks, all meetings, first place, and missing answers.

The content is a report of blocks, so the page is static and offline as every report.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from whorl.evals.arena.standings import Meeting, Standing, Standings
from whorl.report.blocks import EMPTY, Card, Column, StepReport, Table, Text
from whorl.report.data import ReportData
from whorl.report.render import render

RATING_HEADS = (
    "model",
    "rank",
    "points",
    "interval",
    "bootstrap",
    "first in",
    "votes",
    "won",
    "lost",
    "tied",
    "both bad",
)
MEETING_HEADS = ("first", "second", "won", "lost", "tied", "both bad", "expected", "interval", "p")


def write_arena_page(
    found: Standings, out: Path, title: str = "Arena", missing: Mapping[str, int] | None = None
) -> Path:
    """Write the page of an arena, and return its path.

    Args:
        missing: model -> answers that did not arrive.

    Raises:
        ConfigError: `out` is a folder or a device.
    """
    report = StepReport(
        summary=found.text,
        cards=[
            Card(label="First", value=found.rows[0].model, more=f"{found.rows[0].points:.0f} points"),
            Card(label="Votes", value=f"{found.votes:,}"),
            Card(label="Models", value=str(len(found.rows))),
        ],
        blocks=[
            _table("Ratings", "", RATING_HEADS, [rating_cells(row) for row in found.rows], text=1, note=_rating_note(found)),
            _expected(found),
            _table("Meetings", "", MEETING_HEADS, [meeting_cells(each) for each in found.meetings], text=2, note=(
                "Outcomes of the first model. Expected: its score by the ratings, a tie counted half. p-values are "
                "corrected for all pairs (Holm)."
            )),
            *_effects(found),
            *_missing(missing or {}),
        ],
    )  # fmt: skip
    return render(ReportData(title=title, reports=[("arena", report)]), out)


def rating_cells(row: Standing) -> list[str]:
    """Return the cells of a model, under `RATING_HEADS`."""
    rank = str(row.rank_low) if row.rank_low == row.rank_high else f"{row.rank_low}-{row.rank_high}"
    boot = EMPTY if row.bootstrap_low is None else f"{row.bootstrap_low:.0f} to {row.bootstrap_high:.0f}"
    first = EMPTY if row.first_share is None else f"{row.first_share:.1%}"
    counts = (row.votes, row.wins, row.losses, row.ties, row.both_bad)
    return [
        row.model,
        rank,
        f"{row.points:.0f}",
        f"{row.low:.0f} to {row.high:.0f}",
        boot,
        first,
        *map(str, counts),
    ]


def meeting_cells(each: Meeting) -> list[str]:
    """Return the cells of a pair, under `MEETING_HEADS`."""
    counts = map(str, (each.wins, each.losses, each.ties, each.both_bad))
    interval = f"{each.low:.1%} to {each.high:.1%}"
    return [each.a, each.b, *counts, f"{each.expected:.1%}", interval, f"{each.p_value:.3g}"]


def _rating_note(found: Standings) -> str:
    note = (
        "Bradley-Terry points: 400 are odds of 10 to 1, the mean is 1000. "
        f"{found.level:.0%} intervals: from the sandwich covariance, and of ratings of votes drawn again (bootstrap). "
        "Ranks: those that no certain difference excludes. First in: share of bootstrap draws."
    )
    return f"Provisional: {found.provisional}. {note}" if found.provisional else note


def _table(
    section: str, title: str, heads: tuple[str, ...], rows: list[list[str]], *, text: int, note: str = ""
) -> Table:
    """Return a table whose first `text` columns are texts."""
    columns = [Column(name=name, number=k >= text) for k, name in enumerate(heads)]
    return Table(section=section, title=title, note=note, columns=columns, rows=[[*row] for row in rows])


def _expected(found: Standings) -> Table:
    names = tuple(row.model for row in found.rows)
    shares = {}
    for each in found.meetings:
        shares[each.a, each.b], shares[each.b, each.a] = each.expected, 1 - each.expected
    rows = [[a, *(f"{shares[a, b]:.1%}" if (a, b) in shares else "" for b in names)] for a in names]
    note = "Expected score of the row's model against the column's, by the ratings."
    return _table("Expected scores", "", ("model", *names), rows, text=1, note=note)


def _effects(found: Standings) -> list[Table]:
    if not found.effects:
        return []
    rows = [[e.name, f"{e.points:+.0f}", f"{e.low:+.0f} to {e.high:+.0f}"] for e in found.effects]
    note = "Points per standard deviation of the difference. The ratings are those at equal values."
    return [_table("Covariates", "", ("covariate", "points", "interval"), rows, text=1, note=note)]


def _missing(missing: Mapping[str, int]) -> list[Text]:
    if not missing:
        return []
    lines = [
        f"{model}: {n:,} answers did not arrive; their battles have no vote." for model, n in missing.items()
    ]
    return [Text(section="Missing answers", lines=lines)]
